//! Tensors without data: a shape, a dtype, a storage, and perhaps a gradient function.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use ledger::{Category, DeviceId, Dtype, ObjectId, Stream};

use crate::dims::Dims;
use crate::graph::{Edge, Node};
use crate::session::Session;

/// Memory of the device. The free is written to the tape when the last holder goes.
pub(crate) struct Storage {
    /// None where nothing can be allocated: an empty tensor, or one made after a recomputation stopped.
    session: Option<Rc<Session>>,
    /// None where nothing is allocated now.
    object: Cell<Option<ObjectId>>,
    /// Where the elements are now, if not in `object`, whose name they keep (`tensor.data = …`).
    elsewhere: RefCell<Option<Rc<Self>>>,
    /// The stream it was allocated on.
    stream: Cell<Stream>,
    /// Another stream that works on it: its block returns when the next one is asked for.
    recorded: Cell<Option<Stream>>,
    pub(crate) device: DeviceId,
}

impl Storage {
    /// One without memory.
    pub(crate) fn none(device: DeviceId) -> Rc<Self> {
        Self::made(None, None, device)
    }

    /// That of `object`.
    pub(crate) fn of(session: &Rc<Session>, object: ObjectId, device: DeviceId) -> Rc<Self> {
        Self::made(Some(Rc::clone(session)), Some(object), device)
    }

    fn made(session: Option<Rc<Session>>, object: Option<ObjectId>, device: DeviceId) -> Rc<Self> {
        let stream = session.as_ref().map_or(Stream(0), |session| session.stream());
        Rc::new(Self {
            session,
            object: Cell::new(object),
            elsewhere: RefCell::default(),
            stream: Cell::new(stream),
            recorded: Cell::new(None),
            device,
        })
    }

    /// Frees what is allocated (`resize_(0)`).
    fn free(&self) {
        if let Some(elsewhere) = self.elsewhere.take() {
            drop(elsewhere);
        } else if let (Some(session), Some(object)) = (&self.session, self.object.take()) {
            session.record_free(object, self.recorded.take());
        }
    }

    /// Has its elements in `other` from here on, under its own name; what it held is let go.
    fn move_into(&self, other: &Rc<Self>) {
        let there = other.elsewhere.borrow().clone().unwrap_or_else(|| Rc::clone(other));
        let name = self.object.get();
        self.free();
        self.object.set(name);
        self.elsewhere.replace(Some(there));
    }

    /// Takes over the memory of `other`, which nothing else holds.
    fn adopt(&self, other: &Self) {
        self.free();
        self.object.set(other.object.take());
        self.stream.set(other.stream.get());
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        self.free();
    }
}

/// What autograd knows of a tensor.
#[derive(Default)]
struct Autograd {
    requires_grad: bool,
    function: Option<Edge>,
    accumulator: Weak<Node>,
    grad: Option<Tensor>,
    accumulated: Option<Rc<dyn Fn()>>,
    after_accumulator: Option<Rc<dyn Fn()>>,
    /// Set where it is not the leaf's own.
    grad_dtype: Option<Option<Dtype>>,
}

/// Whether a tensor wants a gradient, and the function it came from.
#[derive(Clone)]
pub(crate) struct History {
    requires_grad: bool,
    function: Option<Edge>,
}

struct Inner {
    session: Rc<Session>,
    autograd: RefCell<Autograd>,
    storage: Rc<Storage>,
    base: Option<Tensor>,
    shape: Dims,
    strides: Dims,
    offset: u64,
    dtype: Dtype,
}

/// A handle on a tensor: cloning it is what assigning a name is in Python.
#[derive(Clone)]
pub struct Tensor(Rc<Inner>);

impl Tensor {
    /// A contiguous tensor, named `what` in the current module.
    pub fn empty(session: &Rc<Session>, what: &'static str, shape: impl Into<Dims>, dtype: Dtype) -> Self {
        let shape = shape.into();
        Self::strided(session, what, shape, shape.contiguous_strides(), dtype)
    }

    /// A dense tensor with the given strides.
    pub(crate) fn strided(
        session: &Rc<Session>,
        what: &'static str,
        shape: Dims,
        strides: Dims,
        dtype: Dtype,
    ) -> Self {
        Self::allocate(session, what, session.current_category(), shape, strides, dtype)
    }

    /// A contiguous tensor of a given category.
    pub fn of_category(
        session: &Rc<Session>,
        what: &'static str,
        category: Category,
        shape: impl Into<Dims>,
        dtype: Dtype,
    ) -> Self {
        let shape = shape.into();
        Self::allocate(session, what, category, shape, shape.contiguous_strides(), dtype)
    }

    /// A contiguous tensor of host memory, of a given category.
    pub fn of_host(
        session: &Rc<Session>,
        what: &'static str,
        category: Category,
        shape: impl Into<Dims>,
        dtype: Dtype,
    ) -> Self {
        Self::on(session, Session::HOST, what, category, shape.into(), dtype)
    }

    /// A contiguous tensor on `device`, of a given category.
    fn on(
        session: &Rc<Session>,
        device: DeviceId,
        what: &'static str,
        category: Category,
        shape: Dims,
        dtype: Dtype,
    ) -> Self {
        let bytes = shape.numel() * dtype.size();
        let storage = session.storage_on(device, bytes, what, category, Some((dtype, shape)));
        Self::from_parts(session, storage, None, shape, shape.contiguous_strides(), 0, dtype)
    }

    /// A contiguous tensor that belongs to this one: named after it, owned by its module, beside it.
    pub fn companion(&self, what: &str, category: Category, shape: &[u64], dtype: Dtype) -> Self {
        let shape = Dims::new(shape);
        self.companion_of(self.object(), self.device(), what, category, (dtype, shape))
    }

    /// A contiguous tensor of host memory that belongs to this one.
    pub fn host_companion(&self, what: &str, category: Category) -> Self {
        let layout = (self.dtype(), self.shape());
        self.companion_of(self.object(), Session::HOST, what, category, layout)
    }

    /// A contiguous tensor on `device`, named after `of`.
    pub(crate) fn companion_of(
        &self,
        of: Option<ObjectId>,
        device: DeviceId,
        what: &str,
        category: Category,
        (dtype, shape): (Dtype, Dims),
    ) -> Self {
        let session = self.session();
        let bytes = shape.numel() * dtype.size();
        let storage = session.companion(device, of, bytes, what, category, (dtype, shape));
        Self::from_parts(session, storage, None, shape, shape.contiguous_strides(), 0, dtype)
    }

    /// A contiguous tensor of a given category beside this one.
    pub fn beside(
        &self,
        what: &'static str,
        category: Category,
        shape: impl Into<Dims>,
        dtype: Dtype,
    ) -> Self {
        Self::on(self.session(), self.device(), what, category, shape.into(), dtype)
    }

    pub(crate) fn allocate(
        session: &Rc<Session>,
        what: &'static str,
        category: Category,
        shape: Dims,
        strides: Dims,
        dtype: Dtype,
    ) -> Self {
        let bytes = shape.numel() * dtype.size();
        let storage = session.storage(bytes, what, category, Some((dtype, shape)));
        Self::from_parts(session, storage, None, shape, strides, 0, dtype)
    }

    fn from_parts(
        session: &Rc<Session>,
        storage: Rc<Storage>,
        base: Option<Self>,
        shape: Dims,
        strides: Dims,
        offset: u64,
        dtype: Dtype,
    ) -> Self {
        Self(Rc::new(Inner {
            session: Rc::clone(session),
            autograd: RefCell::default(),
            storage,
            base,
            shape,
            strides,
            offset,
            dtype,
        }))
    }

    /// A dense tensor laid out like this one, or contiguous where this one is not dense.
    pub(crate) fn empty_like(&self, what: &'static str, dtype: Dtype) -> Self {
        Self::strided(self.session(), what, self.shape(), self.dense_strides(), dtype)
    }

    /// Its strides where it is dense, else those of a dense tensor walked in the same order.
    pub(crate) fn dense_strides(&self) -> Dims {
        if self.is_dense() {
            return self.strides();
        }
        let order = crate::dims::iteration_order(&self.shape(), &[self.strides()], None);
        self.shape().strides_in_order(&order)
    }

    /// A view on the same storage; its root base stays alive with it, as PyTorch keeps it.
    pub(crate) fn view_as(&self, shape: Dims, strides: Dims, offset: u64) -> Self {
        let base = self.0.base.clone().unwrap_or_else(|| self.clone());
        Self::from_parts(
            self.session(),
            Rc::clone(&self.0.storage),
            Some(base),
            shape,
            strides,
            offset,
            self.dtype(),
        )
    }

    /// This tensor, of its dense memory, in other strides.
    pub(crate) fn laid_out(self, strides: Dims) -> Self {
        let storage = Rc::clone(&self.0.storage);
        Self::from_parts(self.session(), storage, None, self.shape(), strides, 0, self.dtype())
    }

    /// A tensor on the same storage without history and without a base.
    pub fn detach(&self) -> Self {
        Self::from_parts(
            self.session(),
            Rc::clone(&self.0.storage),
            None,
            self.shape(),
            self.strides(),
            self.0.offset,
            self.dtype(),
        )
    }

    /// A tensor of these extents without memory.
    pub(crate) fn lost(self) -> Self {
        let storage = Storage::none(self.device());
        Self::from_parts(self.session(), storage, None, self.shape(), self.strides(), 0, self.dtype())
    }

    /// The session this tensor lives in.
    pub fn session(&self) -> &Rc<Session> {
        &self.0.session
    }

    /// The extents, outermost first.
    pub fn shape(&self) -> Dims {
        self.0.shape
    }

    /// The extent of `dim`; negative counts from the last.
    pub fn size(&self, dim: isize) -> u64 {
        self.0.shape[self.dim(dim)]
    }

    /// The index of `dim`; negative counts from the last.
    pub(crate) fn dim(&self, dim: isize) -> usize {
        dim.checked_rem_euclid(self.0.shape.len() as isize).unwrap_or(0) as usize
    }

    pub(crate) fn strides(&self) -> Dims {
        self.0.strides
    }

    pub(crate) fn offset(&self) -> u64 {
        self.0.offset
    }

    /// `name = value`: what the name was bound to dies once `value` is there. Where a recomputation ended in making
    /// it, the name stays as it was until its frame is left.
    pub fn rebind(&mut self, value: Self) {
        if !self.session().stopped.get() {
            *self = value;
        }
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.0.dtype
    }

    /// The number of elements.
    pub fn numel(&self) -> u64 {
        self.0.shape.numel()
    }

    /// Bytes of the elements.
    pub fn nbytes(&self) -> u64 {
        self.numel() * self.dtype().size()
    }

    /// Whether the elements lie in row-major order.
    pub fn is_contiguous(&self) -> bool {
        self.0.shape.is_contiguous(&self.0.strides)
    }

    pub(crate) fn is_dense(&self) -> bool {
        self.0.shape.is_dense(&self.0.strides)
    }

    pub(crate) fn is_view(&self) -> bool {
        self.0.base.is_some()
    }

    /// Whether both are handles on one tensor.
    pub fn same(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// The object of the tape behind this tensor; none where nothing was allocated.
    pub(crate) fn object(&self) -> Option<ObjectId> {
        self.0.storage.object.get()
    }

    /// Where its memory is.
    pub(crate) fn device(&self) -> DeviceId {
        self.0.storage.device
    }

    /// Handles on this tensor.
    pub(crate) fn handles(&self) -> usize {
        Rc::strong_count(&self.0)
    }

    /// Whether this handle is the only one, on a storage that nothing else holds.
    pub(crate) fn is_sole_owner(&self) -> bool {
        self.handles() == 1 && Rc::strong_count(&self.0.storage) == 1
    }

    /// Whether a gradient flows through this tensor.
    pub fn requires_grad(&self) -> bool {
        let autograd = self.0.autograd.borrow();
        autograd.requires_grad || autograd.function.is_some()
    }

    /// Makes this a leaf that wants a gradient.
    pub fn set_requires_grad(&self) {
        self.0.autograd.borrow_mut().requires_grad = true;
    }

    pub(crate) fn is_leaf(&self) -> bool {
        self.0.autograd.borrow().function.is_none()
    }

    pub(crate) fn history(&self) -> History {
        let autograd = self.0.autograd.borrow();
        History { requires_grad: autograd.requires_grad, function: autograd.function.clone() }
    }

    pub(crate) fn set_history(&self, history: History) {
        let mut autograd = self.0.autograd.borrow_mut();
        (autograd.requires_grad, autograd.function) = (history.requires_grad, history.function);
    }

    pub(crate) fn set_function(&self, edge: Edge) {
        self.0.autograd.borrow_mut().function = Some(edge);
    }

    /// Where the gradient of this tensor goes: its function, or the accumulator of a leaf.
    pub(crate) fn gradient_edge(&self) -> Option<Edge> {
        let mut autograd = self.0.autograd.borrow_mut();
        if let Some(edge) = &autograd.function {
            return Some(edge.clone());
        }
        if !autograd.requires_grad {
            return None;
        }
        let node = autograd.accumulator.upgrade().unwrap_or_else(|| {
            let node =
                Rc::new(Node::accumulate(self.clone(), autograd.grad_dtype.unwrap_or(Some(self.dtype()))));
            autograd.accumulator = Rc::downgrade(&node);
            node
        });
        Some(Edge { node, input: 0 })
    }

    /// The accumulated gradient of a leaf.
    pub fn grad(&self) -> Option<Self> {
        self.0.autograd.borrow().grad.clone()
    }

    /// Runs `hook` whenever a gradient has been accumulated (`register_post_accumulate_grad_hook`), or
    /// nothing any more.
    pub fn on_accumulated(&self, hook: Option<Rc<dyn Fn()>>) {
        let old = std::mem::replace(&mut self.0.autograd.borrow_mut().accumulated, hook);
        drop(old);
    }

    /// Runs `hook` whenever the function that accumulates a gradient has run (a post hook of `AccumulateGrad`): what
    /// came lives until it returns.
    pub fn after_accumulator(&self, hook: Rc<dyn Fn()>) {
        self.0.autograd.borrow_mut().after_accumulator = Some(hook);
    }

    pub(crate) fn hook_after_accumulator(&self) -> Option<Rc<dyn Fn()>> {
        self.0.autograd.borrow().after_accumulator.clone()
    }

    pub(crate) fn accumulated_hook(&self) -> Option<Rc<dyn Fn()>> {
        self.0.autograd.borrow().accumulated.clone()
    }

    /// A leaf whose memory comes and goes (see [`Tensor::resize_storage`]): none is allocated yet.
    pub fn without_storage(
        session: &Rc<Session>,
        shape: impl Into<Dims>,
        dtype: Dtype,
        on_host: bool,
    ) -> Self {
        let shape = shape.into();
        let device = if on_host { Session::HOST } else { Session::DEVICE };
        let storage = Storage::made(Some(Rc::clone(session)), None, device);
        Self::from_parts(session, storage, None, shape, shape.contiguous_strides(), 0, dtype)
    }

    /// Allocates `bytes` for this tensor and its views, named `what` in the current module, where nothing is
    /// allocated (`untyped_storage().resize_`).
    pub fn resize_storage(&self, what: &'static str, category: Category, bytes: u64) {
        if self.object().is_none() {
            self.replace_storage(what, category, bytes);
        }
    }

    /// Other memory for this tensor and its views: what they had is freed once it is there.
    pub fn replace_storage(&self, what: &'static str, category: Category, bytes: u64) {
        let layout = Some((self.dtype(), self.shape()));
        let new = self.session().storage_on(self.device(), bytes, what, category, layout);
        self.0.storage.adopt(&new);
    }

    /// A tensor on the memory that this one has now, whatever becomes of this one (`detach()` of `data`).
    pub(crate) fn held(&self) -> Self {
        let storage = &self.0.storage;
        if storage.elsewhere.borrow().is_none() {
            return self.detach();
        }
        let own = Storage::made(Some(Rc::clone(self.session())), None, storage.device);
        own.move_into(storage);
        own.object.set(storage.object.get());
        Self::from_parts(self.session(), own, None, self.shape(), self.strides(), self.0.offset, self.dtype())
    }

    /// A view of `shape` from element `start` on, without history and without a base.
    pub fn window(&self, start: u64, shape: Dims) -> Self {
        let storage = Rc::clone(&self.0.storage);
        Self::from_parts(
            self.session(),
            storage,
            None,
            shape,
            shape.contiguous_strides(),
            start,
            self.dtype(),
        )
    }

    /// The memory behind this tensor is of `category` from here on.
    pub fn become_category(&self, category: Category) {
        if let Some(object) = self.object() {
            self.session().relabel(object, object, category);
        }
    }

    /// Whether both lie in the same memory.
    pub fn shares_memory(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0.storage, &other.0.storage)
    }

    /// Whether its elements are floating-point numbers.
    pub fn is_floating(&self) -> bool {
        crate::ops::is_floating(self.dtype())
    }

    /// The dtype to which incoming gradients of this leaf are cast; none: they stay as they come.
    pub fn set_grad_dtype(&self, dtype: Option<Dtype>) {
        let accumulator = {
            let mut autograd = self.0.autograd.borrow_mut();
            autograd.grad_dtype = Some(dtype);
            autograd.accumulator.upgrade()
        };
        if let Some(node) = accumulator {
            node.set_dtype(dtype);
        }
    }

    /// Its elements lie in the memory of `other` from here on, under its own name (`self.data = other[…]`).
    pub fn move_into(&self, other: &Self) {
        self.0.storage.move_into(&other.0.storage);
    }

    /// `stream` works on the memory of this tensor (`record_stream`).
    pub fn record_stream(&self, stream: Stream) {
        let storage = &self.0.storage;
        let elsewhere = storage.elsewhere.borrow();
        let memory = elsewhere.as_ref().unwrap_or(storage);
        if memory.stream.get() != stream {
            memory.recorded.set(Some(stream));
        }
    }

    /// Frees the memory of this tensor and its views, which stay.
    pub fn free_storage(&self) {
        self.0.storage.free();
    }

    /// Replaces the accumulated gradient.
    pub fn set_grad(&self, grad: Option<Self>) {
        let old = std::mem::replace(&mut self.0.autograd.borrow_mut().grad, grad);
        drop(old);
    }
}
