//! A run: the tape that is written, and the modes that operators obey.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use ledger::{
    Bytes, Category, Device, DeviceId, Dtype, Event, Label, LabelId, Layout, LayoutId, Mark, Name, Object,
    ObjectId, Phase, Pool, Stream, Tape, Unit,
};
use rustc_hash::FxHashMap;

use crate::checkpoint::SavedHook;
use crate::dims::Dims;
use crate::hardware::{CUBLASLT_WORKSPACE, Hardware, Lifetime, Profile};
use crate::ops::is_floating;
use crate::tensor::{Storage, Tensor};

/// Where floating-point operations are booked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlopCount {
    /// Of the forward pass.
    pub forward: u64,
    /// Of the backward pass, without recomputation.
    pub backward: u64,
    /// Of the forward pass run again inside backward.
    pub recompute: u64,
    /// Of the optimizer.
    pub update: u64,
}

/// Bytes that went over the bus between the device and the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// From the device.
    pub to_host: u64,
    /// To the device.
    pub from_host: u64,
}

/// What ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Collective {
    /// Every rank has the sum. Bytes: of the tensor.
    AllReduce,
    /// Every rank has the parts of all. Bytes: of the whole.
    AllGather,
    /// Every rank has its part of the sum. Bytes: of the whole.
    ReduceScatter,
    /// Every rank has what one had. Bytes: of the tensor.
    Broadcast,
    /// One rank has the sum. Bytes: of the tensor.
    Reduce,
}

impl Collective {
    /// The word used in documents.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
        }
    }
}

/// How many collective operations there were, and over how many bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Messages {
    /// Operations.
    pub count: u64,
    /// Their bytes, together.
    pub bytes: u64,
}

/// A module path, collapsed and in full: `model.layers.*.mlp` and `model.layers.7.mlp`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Scope {
    kind: Name,
    path: Name,
}

/// An autocast region: its dtype and the weights cast so far.
struct Autocast {
    dtype: Dtype,
    cache: Vec<(Tensor, Tensor)>,
}

/// One run of eager steps on shapes.
///
/// Single-threaded: tensors hold the session, and the free of a storage is written to the tape when
/// its last holder goes.
pub struct Session {
    /// The card.
    pub hardware: Hardware,
    /// The release of torch.
    pub profile: Profile,
    tape: RefCell<Tape>,
    scope: Cell<Scope>,
    /// The modules met so far, by the one around them and their name: entering one is a look-up.
    scopes: RefCell<FxHashMap<Scope, FxHashMap<String, Scope>>>,
    labels: RefCell<FxHashMap<(Scope, &'static str, Category), LabelId>>,
    layouts: RefCell<FxHashMap<(Dtype, Dims), LayoutId>>,
    category: Cell<Category>,
    flops: Cell<FlopCount>,
    traffic: Cell<Traffic>,
    grad_enabled: Cell<bool>,
    sequence: Cell<u64>,
    autocast: RefCell<Option<Autocast>>,
    /// Workspaces kept for the life of a handle, by name and whether autograd's thread has it.
    kept_workspaces: RefCell<FxHashMap<(&'static str, bool), Rc<Storage>>>,
    pub(crate) hooks: RefCell<Vec<SavedHook>>,
    pub(crate) stopped: Cell<bool>,
    pub(crate) recomputing: Cell<bool>,
    in_backward: Cell<bool>,
    probed_bf16: Cell<bool>,
    stream: Cell<Stream>,
    collectives: RefCell<BTreeMap<Collective, Messages>>,
    /// What was let go while another stream worked on it.
    awaited: RefCell<Vec<(Stream, ObjectId)>>,
    pub(crate) after_backward: RefCell<Vec<Box<dyn FnOnce()>>>,
}

impl Session {
    /// A session on one GPU with nothing allocated.
    pub fn new(device: Device, hardware: Hardware, profile: Profile) -> Rc<Self> {
        let mut tape = Tape::new(Unit::Requested, vec![device]);
        let root = tape.intern("");
        Rc::new(Self {
            hardware,
            profile,
            tape: RefCell::new(tape),
            scope: Cell::new(Scope { kind: root, path: root }),
            scopes: RefCell::default(),
            labels: RefCell::default(),
            layouts: RefCell::default(),
            category: Cell::new(Category::Activation),
            flops: Cell::default(),
            traffic: Cell::default(),
            grad_enabled: Cell::new(true),
            sequence: Cell::new(0),
            autocast: RefCell::new(None),
            kept_workspaces: RefCell::default(),
            hooks: RefCell::default(),
            stopped: Cell::new(false),
            recomputing: Cell::new(false),
            in_backward: Cell::new(false),
            probed_bf16: Cell::new(false),
            stream: Cell::new(Stream(0)),
            collectives: RefCell::default(),
            awaited: RefCell::default(),
            after_backward: RefCell::default(),
        })
    }

    /// The GPU.
    pub(crate) const DEVICE: DeviceId = DeviceId(0);
    /// The device of [`Session::add_host`].
    pub(crate) const HOST: DeviceId = DeviceId(1);

    /// The host's memory becomes a device of the tape, once, before anything is put there.
    pub fn add_host(&self, host: Device) {
        let mut tape = self.tape.borrow_mut();
        if tape.devices.len() == usize::from(Self::HOST.0) {
            tape.devices.push(host);
        }
    }

    /// The tape written so far; the session goes on with an empty one of no use.
    pub fn take_tape(&self) -> Tape {
        self.tape.replace(Tape::new(Unit::Requested, Vec::new()))
    }

    /// Bytes of the GPU that nothing holds, where its size is known.
    pub fn unallocated(&self) -> Option<u64> {
        let tape = self.tape.borrow();
        let capacity = tape.devices.first()?.capacity?;
        let mut held: FxHashMap<ObjectId, u64> = FxHashMap::default();
        for event in tape.events() {
            match event {
                Event::Alloc { object, bytes, device, .. } if device == Self::DEVICE => {
                    held.insert(object, bytes.get());
                }
                Event::Free(object) => {
                    held.remove(&object);
                }
                _ => {}
            }
        }
        Some(capacity.get().saturating_sub(held.values().sum()))
    }

    /// Begins a phase.
    pub fn mark(&self, step: u32, micro_batch: Option<u32>, phase: Phase) {
        self.category.set(match phase {
            Phase::LOAD | Phase::FORWARD => Category::Activation,
            _ => Category::Temporary,
        });
        self.tape.borrow_mut().mark(Mark { step, micro_batch, phase, text: None });
    }

    /// Floating-point operations since the session began.
    pub fn flops(&self) -> FlopCount {
        self.flops.get()
    }

    /// What was copied to the host and back since the session began; the batch is not counted.
    pub fn traffic(&self) -> Traffic {
        self.traffic.get()
    }

    /// Counts a copy to the host and one from it, of so many bytes.
    pub fn add_traffic(&self, to_host: u64, from_host: u64) {
        let traffic = self.traffic.get();
        self.traffic
            .set(Traffic { to_host: traffic.to_host + to_host, from_host: traffic.from_host + from_host });
    }

    pub(crate) fn add_flops(&self, count: u64) {
        if self.stopped.get() {
            return;
        }
        let mut flops = self.flops.get();
        let account = if self.recomputing.get() {
            &mut flops.recompute
        } else if self.in_backward.get() {
            &mut flops.backward
        } else if self.category.get() == Category::Activation {
            &mut flops.forward
        } else {
            &mut flops.update
        };
        *account += count;
        self.flops.set(flops);
    }

    /// Runs `f` inside the module `name` of the current one; a number becomes `*` in kinds.
    pub fn scoped<R>(&self, name: &str, f: impl FnOnce() -> R) -> R {
        let outer = self.scope.get();
        self.scope.set(self.child(outer, name));
        let result = f();
        self.scope.set(outer);
        result
    }

    fn child(&self, outer: Scope, name: &str) -> Scope {
        let mut scopes = self.scopes.borrow_mut();
        let children = scopes.entry(outer).or_default();
        if let Some(child) = children.get(name) {
            return *child;
        }
        let mut tape = self.tape.borrow_mut();
        let collapsed: String = name
            .split('.')
            .map(|part| if part.parse::<u32>().is_ok() { "*" } else { part })
            .collect::<Vec<_>>()
            .join(".");
        let mut join = |outer: Name, name: &str| {
            let outer = tape.name(outer);
            let path = if outer.is_empty() { name.to_owned() } else { format!("{outer}.{name}") };
            tape.intern(&path)
        };
        let child = Scope { kind: join(outer.kind, &collapsed), path: join(outer.path, name) };
        children.insert(name.to_owned(), child);
        child
    }

    /// The module that runs now.
    pub fn scope(&self) -> Scope {
        self.scope.get()
    }

    /// Runs `f` inside the module `scope`.
    pub fn in_scope<R>(&self, scope: Scope, f: impl FnOnce() -> R) -> R {
        let outer = self.scope.replace(scope);
        let result = f();
        self.scope.set(outer);
        result
    }

    /// Whether operators record a graph.
    pub fn grad_enabled(&self) -> bool {
        self.grad_enabled.get()
    }

    /// Runs `f` with or without recording a graph.
    pub fn with_grad<R>(&self, enabled: bool, f: impl FnOnce() -> R) -> R {
        let outer = self.grad_enabled.replace(enabled);
        let result = f();
        self.grad_enabled.set(outer);
        result
    }

    /// Runs `f`, whose tensors are of `category` where nothing else is said.
    pub fn with_category<R>(&self, category: Category, f: impl FnOnce() -> R) -> R {
        let outer = self.category.replace(category);
        let result = f();
        self.category.set(outer);
        result
    }

    /// Whether backward runs.
    pub fn is_in_backward(&self) -> bool {
        self.in_backward.get()
    }

    pub(crate) fn backward_mode<R>(&self, f: impl FnOnce() -> R) -> R {
        self.in_backward.set(true);
        let result = self.with_category(Category::Temporary, || self.with_grad(false, f));
        self.in_backward.set(false);
        result
    }

    pub(crate) fn next_sequence(&self) -> u64 {
        let next = self.sequence.get();
        self.sequence.set(next + 1);
        next
    }

    /// Runs `f` in an autocast region of `dtype`, whose cache of cast weights is dropped at its end.
    /// `None` runs `f` as it is.
    pub fn autocast<R>(self: &Rc<Self>, dtype: Option<Dtype>, f: impl FnOnce() -> R) -> R {
        let Some(dtype) = dtype else { return f() };
        // torch asks an old card once whether it can hold bf16 at all, by making such a scalar.
        if dtype == Dtype::Bf16 && !self.hardware.native_bf16() && !self.probed_bf16.replace(true) {
            drop(self.scratch(2, "bf16_probe"));
        }
        let outer = self.autocast.replace(Some(Autocast { dtype, cache: Vec::new() }));
        let result = f();
        let inner = self.autocast.replace(outer);
        drop(inner);
        result
    }

    /// Runs `f` with autocast switched off, the cache of the region around it kept.
    pub(crate) fn without_autocast<R>(&self, f: impl FnOnce() -> R) -> R {
        let region = self.autocast.take();
        let result = f();
        self.autocast.replace(region);
        result
    }

    /// The dtype of the autocast region, where there is one.
    pub fn autocast_dtype(&self) -> Option<Dtype> {
        self.autocast.borrow().as_ref().map(|region| region.dtype)
    }

    /// `tensor` as an operator of autocast's lower-precision list takes it: fp32 leaf parameters are
    /// cast once a region, other floating-point tensors each time.
    pub(crate) fn autocast_low(&self, tensor: &Tensor) -> Tensor {
        let Some(dtype) = self.autocast_dtype() else { return tensor.clone() };
        if !is_floating(tensor.dtype()) || tensor.dtype() == dtype || tensor.dtype() == Dtype::Fp64 {
            return tensor.clone();
        }
        let cacheable =
            tensor.dtype() == Dtype::Fp32 && tensor.requires_grad() && tensor.is_leaf() && !tensor.is_view();
        if cacheable {
            let region = self.autocast.borrow();
            let cache = region.iter().flat_map(|region| &region.cache);
            if let Some((_, cast)) = cache.into_iter().find(|(weight, _)| weight.same(tensor)) {
                return cast.clone();
            }
        }
        let cast = if cacheable {
            self.with_category(Category::Temporary, || tensor.to(dtype))
        } else {
            tensor.to(dtype)
        };
        if cacheable && let Some(region) = self.autocast.borrow_mut().as_mut() {
            region.cache.push((tensor.clone(), cast.clone()));
        }
        cast
    }

    /// `tensor` as an operator of autocast's fp32 list takes it.
    pub(crate) fn autocast_fp32(&self, tensor: &Tensor) -> Tensor {
        let low = matches!(tensor.dtype(), Dtype::Fp16 | Dtype::Bf16);
        if self.autocast_dtype().is_some() && low { tensor.to(Dtype::Fp32) } else { tensor.clone() }
    }

    fn label(&self, what: &'static str, category: Category) -> LabelId {
        let scope = self.scope.get();
        if let Some(label) = self.labels.borrow().get(&(scope, what, category)) {
            return *label;
        }
        let mut tape = self.tape.borrow_mut();
        let kind = tape.name(scope.kind);
        let name = match (kind.is_empty(), what.is_empty()) {
            (_, true) => kind.to_owned(),
            (true, _) => what.to_owned(),
            _ => format!("{kind}.{what}"),
        };
        let name = tape.intern(&name);
        let owner = (!tape.name(scope.path).is_empty()).then_some(scope.path);
        let label = tape.intern_label(Label { name, owner, category, saved: false });
        self.labels.borrow_mut().insert((scope, what, category), label);
        label
    }

    /// A storage of `bytes`, named `what` in the current module. Nothing is written where it is
    /// empty or the recomputation has already got all it wants.
    pub(crate) fn storage(
        self: &Rc<Self>,
        bytes: u64,
        what: &'static str,
        category: Category,
        layout: Option<(Dtype, Dims)>,
    ) -> Rc<Storage> {
        self.storage_on(Self::DEVICE, bytes, what, category, layout)
    }

    pub(crate) fn storage_on(
        self: &Rc<Self>,
        device: DeviceId,
        bytes: u64,
        what: &'static str,
        category: Category,
        layout: Option<(Dtype, Dims)>,
    ) -> Rc<Storage> {
        if bytes == 0 || self.stopped.get() {
            return Storage::none(device);
        }
        let label = self.label(what, category);
        self.write_storage(device, bytes, label, layout)
    }

    /// Whether a recomputation has got all it wants: what follows computes nothing.
    pub fn has_stopped(&self) -> bool {
        self.stopped.get()
    }

    /// A storage named after another one.
    pub(crate) fn companion(
        self: &Rc<Self>,
        device: DeviceId,
        of: Option<ObjectId>,
        bytes: u64,
        what: &str,
        category: Category,
        layout: (Dtype, Dims),
    ) -> Rc<Storage> {
        let Some(of) = of.filter(|_| bytes > 0 && !self.stopped.get()) else {
            return Storage::none(device);
        };
        let label = {
            let mut tape = self.tape.borrow_mut();
            let of = tape.label(tape.object(of).label);
            let name = format!("{}.{what}", tape.name(of.name));
            let name = tape.intern(&name);
            tape.intern_label(Label { name, category, saved: false, ..of })
        };
        self.write_storage(device, bytes, label, Some(layout))
    }

    fn write_storage(
        self: &Rc<Self>,
        device: DeviceId,
        bytes: u64,
        label: LabelId,
        layout: Option<(Dtype, Dims)>,
    ) -> Rc<Storage> {
        let mut tape = self.tape.borrow_mut();
        let mut layouts = self.layouts.borrow_mut();
        let layout = layout.map(|(dtype, shape)| {
            let intern = || tape.intern_layout(&Layout { dtype, shape: (*shape).into() });
            *layouts.entry((dtype, shape)).or_insert_with(intern)
        });
        if device == Self::DEVICE {
            let mut awaited = self.awaited.borrow_mut();
            awaited.sort_by_key(|(stream, _)| *stream);
            awaited.drain(..).for_each(|(_, object)| tape.push(Event::Free(object)));
        }
        let object = tape.new_object(Object { label, layout }).expect("a run makes fewer than 2^32 objects");
        tape.push(Event::Alloc {
            object,
            bytes: Bytes::new(bytes),
            device,
            stream: self.stream.get(),
            pool: Pool(0),
        });
        Storage::of(self, object, device)
    }

    /// Where memory is made now.
    pub(crate) const fn stream(&self) -> Stream {
        self.stream.get()
    }

    /// Memory is made on `stream` in `f`. Stream 0 is the one that computes.
    pub fn on_stream<R>(&self, stream: Stream, f: impl FnOnce() -> R) -> R {
        let outer = self.stream.replace(stream);
        let result = f();
        self.stream.set(outer);
        result
    }

    /// Counts a collective operation over so many bytes.
    pub fn collective(&self, kind: Collective, bytes: u64) {
        let mut collectives = self.collectives.borrow_mut();
        let messages = collectives.entry(kind).or_default();
        messages.count += 1;
        messages.bytes += bytes;
    }

    /// The collective operations since the session began, by kind.
    pub fn collectives(&self) -> BTreeMap<Collective, Messages> {
        self.collectives.borrow().clone()
    }

    /// Runs `f` once backward has run all its nodes (`queue_callback`).
    pub fn after_backward(&self, f: impl FnOnce() + 'static) {
        self.after_backward.borrow_mut().push(Box::new(f));
    }

    /// The category of what operators make now.
    pub(crate) fn current_category(&self) -> Category {
        self.category.get()
    }

    /// Scratch memory of a kernel: allocated here, freed when the handle goes.
    pub(crate) fn scratch(self: &Rc<Self>, bytes: u64, what: &'static str) -> Rc<Storage> {
        self.storage(bytes, what, Category::Workspace, None)
    }

    /// The workspace of a product; one with a fused bias goes through cublasLt.
    pub(crate) fn product_workspace(self: &Rc<Self>, fused_bias: bool) {
        let profile = self.profile;
        let cublas =
            || self.workspace(profile.cublas_workspace, self.hardware.cublas_workspace(), "cublas_workspace");
        let lt = || self.workspace(profile.cublaslt_workspace, CUBLASLT_WORKSPACE, "cublaslt_workspace");
        match (fused_bias, profile.cublas_workspace, profile.cublaslt_workspace) {
            (false, ..) => drop(cublas()),
            (true, Lifetime::Product, _) => drop(lt()),
            // The handle, and with it its workspace, is made inside the call.
            (true, Lifetime::Handle, Lifetime::Product) => {
                let workspace = lt();
                drop(cublas());
                drop(workspace);
            }
            (true, Lifetime::Handle, Lifetime::Handle) => {
                drop(cublas());
                drop(lt());
            }
        }
    }

    /// A workspace that the caller holds for a product, or none where its handle keeps it.
    fn workspace(self: &Rc<Self>, lifetime: Lifetime, bytes: u64, what: &'static str) -> Option<Rc<Storage>> {
        if self.stopped.get() {
            return None;
        }
        match lifetime {
            Lifetime::Product => Some(self.scratch(bytes, what)),
            Lifetime::Handle => {
                let key = (what, self.in_backward.get());
                if !self.kept_workspaces.borrow().contains_key(&key) {
                    let workspace = self.scratch(bytes, what);
                    self.kept_workspaces.borrow_mut().insert(key, workspace);
                }
                None
            }
        }
    }

    /// Memory that is made once and kept to the end.
    pub(crate) fn keep(self: &Rc<Self>, what: &'static str, bytes: u64) {
        let key = (what, false);
        if !self.kept_workspaces.borrow().contains_key(&key) {
            let kept = self.scratch(bytes, what);
            self.kept_workspaces.borrow_mut().insert(key, kept);
        }
    }

    /// Notes that `object` is let go; where another stream works on it (`awaited`), its block returns later.
    pub(crate) fn record_free(&self, object: ObjectId, awaited: Option<Stream>) {
        let mut tape = self.tape.borrow_mut();
        if let Some(stream) = awaited {
            tape.push(Event::FreeRequested(object));
            self.awaited.borrow_mut().push((stream, object));
        } else {
            tape.push(Event::Free(object));
        }
    }

    /// Notes that autograd keeps `object`.
    pub(crate) fn note_saved(&self, object: ObjectId) {
        let mut tape = self.tape.borrow_mut();
        let id = tape.object(object).label;
        let label = tape.label(id);
        let kept_anyway =
            matches!(label.category, Category::Parameter | Category::Buffer | Category::OptimizerState);
        if !label.saved && !kept_anyway {
            let saved = tape.intern_label(Label { saved: true, ..label });
            tape.set_label(object, saved);
        }
    }

    /// The category of `object`.
    pub(crate) fn category_of(&self, object: ObjectId) -> Category {
        let tape = self.tape.borrow();
        tape.label(tape.object(object).label).category
    }

    /// The category of the gradient of the leaf `of`: parameters alone have gradients by that name.
    pub(crate) fn gradient_category(&self, of: Option<ObjectId>) -> Category {
        let category = of.map(|of| self.category_of(of));
        let gathered = category == Some(Category::CommunicationBuffer);
        if gathered || category == Some(Category::Parameter) {
            Category::Gradient
        } else {
            Category::Temporary
        }
    }

    /// Gives `object` a new name and category, from here on.
    pub(crate) fn relabel(&self, object: ObjectId, like: ObjectId, category: Category) {
        let mut tape = self.tape.borrow_mut();
        let id = tape.object(like).label;
        let label = tape.label(id);
        let label = tape.intern_label(Label { category, saved: false, ..label });
        tape.push(Event::Relabel(object, label));
    }

    /// Lets go of what the session itself keeps, as at the end of the process.
    pub fn release(&self) {
        let kept = self.kept_workspaces.take();
        drop(kept);
    }
}
