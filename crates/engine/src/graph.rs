//! The graph of backward functions and the engine that walks it.
//!
//! The order of everything here is PyTorch's: nodes with higher sequence numbers first, accumulators
//! before everything, input buffers that add in place where the older gradient has no other owner,
//! and the five moments of a node at which something is let go (see [`run`]).

use std::cell::RefCell;
use std::rc::Rc;

use ledger::{Category, Dtype};
use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use crate::checkpoint::Saved;
use crate::dims::Dims;
use crate::session::{Scope, Session};
use crate::tensor::Tensor;

/// The gradients of a node's inputs, by index; none where none is wanted or none came.
pub type Grads = Vec<Option<Tensor>>;

type Backward = Box<dyn Fn(&Call<'_>) -> Grads>;

/// Where a gradient goes: input `input` of `node`.
#[derive(Clone)]
pub(crate) struct Edge {
    pub(crate) node: Rc<Node>,
    pub(crate) input: usize,
}

/// Where the gradients of a node's inputs go.
type Next = SmallVec<[Option<Edge>; 3]>;

/// A backward that is the owner of the saved values.
type OwningBackward = Box<dyn Fn(&Call<'_>, Vec<Tensor>) -> Grads>;

enum Function {
    /// An operator's backward.
    Operator(Backward),
    /// That of a function written in Python, whose names hold the saved values and the incoming gradients.
    Custom(OwningBackward),
    /// Adds the gradient to the leaf's.
    Accumulate(Tensor),
}

/// The shape of a result, and the dtype that its gradient must have, where it must.
type Expected = (Dims, Option<Dtype>);

/// One backward function. Its lists are short: one allocation holds them all.
pub(crate) struct Node {
    sequence: u64,
    scope: Option<Scope>,
    function: RefCell<Option<Function>>,
    next: RefCell<Next>,
    saved: RefCell<SmallVec<[Saved; 2]>>,
    outputs: RefCell<SmallVec<[Expected; 1]>>,
    /// What runs when the gradients of its outputs are there, before it does.
    pre_hooks: RefCell<Vec<Box<dyn Fn()>>>,
}

impl Node {
    pub(crate) fn accumulate(leaf: Tensor, dtype: Option<Dtype>) -> Self {
        let outputs = smallvec![(leaf.shape(), dtype)];
        Self {
            sequence: u64::MAX,
            scope: None,
            function: RefCell::new(Some(Function::Accumulate(leaf))),
            next: RefCell::default(),
            saved: RefCell::default(),
            outputs: RefCell::new(outputs),
            pre_hooks: RefCell::default(),
        }
    }

    /// Its gradients come in `dtype` from here on.
    pub(crate) fn set_dtype(&self, dtype: Option<Dtype>) {
        for (_, of_output) in &mut *self.outputs.borrow_mut() {
            *of_output = dtype;
        }
    }
}

/// Long chains of nodes are taken apart in a loop: one frame a node would exhaust the stack.
impl Drop for Node {
    fn drop(&mut self) {
        let mut pending = std::mem::take(self.next.get_mut());
        while let Some(edge) = pending.pop() {
            if let Some(mut node) = edge.and_then(|edge| Rc::into_inner(edge.node)) {
                drop(std::mem::take(node.saved.get_mut()));
                pending.extend(node.next.get_mut().drain(..));
            }
        }
    }
}

/// An operator being recorded: made before it computes, finished with its results.
pub(crate) struct Op {
    node: Option<Rc<Node>>,
    session: Rc<Session>,
}

impl Op {
    /// Begins an operator over `inputs`; a node is made when any of them wants a gradient.
    pub(crate) fn new(session: &Rc<Session>, inputs: &[&Tensor]) -> Self {
        let session = Rc::clone(session);
        let any = session.grad_enabled() && inputs.iter().any(|input| input.requires_grad());
        if !any {
            return Self { node: None, session };
        }
        let next: Next = inputs.iter().map(|input| input.gradient_edge()).collect();
        let node = Node {
            sequence: session.next_sequence(),
            scope: Some(session.scope()),
            function: RefCell::new(None),
            next: RefCell::new(next),
            saved: RefCell::default(),
            outputs: RefCell::default(),
            pre_hooks: RefCell::default(),
        };
        Self { node: Some(Rc::new(node)), session }
    }

    pub(crate) const fn session(&self) -> &Rc<Session> {
        &self.session
    }

    /// Whether any input wants a gradient.
    pub(crate) const fn is_recorded(&self) -> bool {
        self.node.is_some()
    }

    /// Whether input `index` wants a gradient.
    pub(crate) fn needs(&self, index: usize) -> bool {
        self.node.as_ref().is_some_and(|node| node.next.borrow()[index].is_some())
    }

    /// Keeps `tensor` for backward. Saved values are unpacked and let go in the order of these calls.
    pub(crate) fn save(&self, tensor: &Tensor) {
        if let Some(node) = &self.node {
            let saved = Saved::pack(&self.session, tensor.clone());
            node.saved.borrow_mut().push(saved);
        }
    }

    /// Keeps of two factors each that the gradient of the other one needs, the right one first; tells
    /// whether the left and the right factor want a gradient.
    pub(crate) fn save_factors(&self, left: &Tensor, right: &Tensor) -> (bool, bool) {
        let (left_wants, right_wants) = (self.needs(0), self.needs(1));
        if left_wants {
            self.save(right);
        }
        if right_wants {
            self.save(left);
        }
        (left_wants, right_wants)
    }

    /// Keeps a result for backward, without its history: a result that held its own node would keep
    /// itself alive.
    pub(crate) fn save_result(&self, tensor: &Tensor) {
        if self.node.is_some() {
            self.save(&tensor.detach());
        }
    }

    /// Attaches the backward function to `result`.
    ///
    /// Where saving the result was the last thing a recomputation waited for, the operator ends there
    /// and its result is lost.
    pub(crate) fn finish(self, result: Tensor, backward: impl Fn(&Call<'_>) -> Grads + 'static) -> Tensor {
        if self.session.stopped.get() {
            return result.lost();
        }
        self.finish_all(std::slice::from_ref(&result), backward);
        result
    }

    /// Attaches the backward of a function written in Python, which takes the saved values.
    pub(crate) fn finish_custom(
        self,
        result: Tensor,
        backward: impl Fn(&Call<'_>, Vec<Tensor>) -> Grads + 'static,
    ) -> Tensor {
        self.attach(std::slice::from_ref(&result), Function::Custom(Box::new(backward)));
        result
    }

    /// Attaches the backward function to several results.
    pub(crate) fn finish_all(self, results: &[Tensor], backward: impl Fn(&Call<'_>) -> Grads + 'static) {
        self.attach(results, Function::Operator(Box::new(backward)));
    }

    fn attach(self, results: &[Tensor], function: Function) {
        let Some(node) = self.node else { return };
        *node.function.borrow_mut() = Some(function);
        *node.outputs.borrow_mut() =
            results.iter().map(|result| (result.shape(), Some(result.dtype()))).collect();
        for (input, result) in results.iter().enumerate() {
            result.set_function(Edge { node: Rc::clone(&node), input });
        }
    }
}

/// One run of a node's backward: its incoming gradients and unpacked saved values.
pub(crate) struct Call<'a> {
    grads: &'a [Option<Tensor>],
    saved: &'a [Tensor],
    next: &'a [Option<Edge>],
}

impl Call<'_> {
    /// The gradient of output 0.
    pub(crate) fn grad(&self) -> &Tensor {
        self.grads[0].as_ref().expect("a node runs only when a gradient came")
    }

    /// The gradient of output `index`, where one came.
    pub(crate) fn grad_of(&self, index: usize) -> Option<&Tensor> {
        self.grads[index].as_ref()
    }

    /// The saved value `index`, in the order in which they were saved.
    pub(crate) fn saved(&self, index: usize) -> &Tensor {
        &self.saved[index]
    }

    /// The number of saved values.
    pub(crate) fn saved_len(&self) -> usize {
        self.saved.len()
    }

    /// Whether input `index` wants a gradient.
    pub(crate) fn needs(&self, index: usize) -> bool {
        self.next[index].is_some()
    }

    /// `make()` where input `index` wants a gradient.
    pub(crate) fn when(&self, index: usize, make: impl FnOnce() -> Tensor) -> Option<Tensor> {
        self.needs(index).then(make)
    }
}

/// Runs backward from the scalar `loss`.
pub fn backward(loss: &Tensor) {
    let session = Rc::clone(loss.session());
    let Some(root) = loss.gradient_edge() else { return };
    let seed = session.with_category(Category::Temporary, || loss.empty_like("loss.grad", loss.dtype()));
    session.backward_mode(|| {
        run(root, seed.clone());
        for callback in session.after_backward.take() {
            callback();
        }
    });
    drop(seed);
}

/// Hands `inputs` on as they are, and runs `backward` when the gradients of all of them are there, before they
/// go on: a function written in Python whose inputs are its results.
pub fn with_backward(inputs: Vec<Tensor>, backward: impl Fn() + 'static) -> Vec<Tensor> {
    let Some(first) = inputs.first() else { return inputs };
    let op = Op::new(first.session(), &inputs.iter().collect::<Vec<_>>());
    if !op.is_recorded() {
        return inputs;
    }
    let results: Vec<Tensor> =
        inputs.iter().map(|input| input.view_as(input.shape(), input.strides(), input.offset())).collect();
    drop(inputs);
    op.finish_all(&results, move |call| {
        backward();
        (0..call.next.len()).map(|index| call.grad_of(index).cloned()).collect()
    });
    results
}

/// A copy of each of `inputs`, named `what`, whose gradient goes on to it: a function written in Python that clones
/// what it is given.
pub fn copies(inputs: &[Tensor], what: &'static str) -> Vec<Tensor> {
    let Some(first) = inputs.first() else { return Vec::new() };
    let op = Op::new(first.session(), &inputs.iter().collect::<Vec<_>>());
    let results: Vec<Tensor> = inputs.iter().map(|input| input.empty_like(what, input.dtype())).collect();
    op.finish_all(&results, |call| (0..call.next.len()).map(|index| call.grad_of(index).cloned()).collect());
    results
}

impl Tensor {
    /// Runs `hook` in backward when the gradient of this result is there, before the function that made it
    /// (`register_hook`). A leaf has no such function.
    pub fn on_gradient(&self, hook: impl Fn() + 'static) {
        if let Some(edge) = self.gradient_edge().filter(|_| !self.is_leaf()) {
            edge.node.pre_hooks.borrow_mut().push(Box::new(hook));
        }
    }
}

/// Runs backward from `result`, whose gradient is `grad`, inside a backward that is running.
pub(crate) fn backward_from(result: &Tensor, grad: &Tensor) {
    if let Some(root) = result.gradient_edge() {
        run(root, grad.clone());
    }
}

/// Gradients that wait for a node.
type InputBuffer = SmallVec<[Option<Tensor>; 1]>;

/// A node that waits for gradients.
#[derive(Default)]
struct Waiting {
    /// How many edges lead to it from nodes that have not run.
    dependencies: u32,
    buffer: InputBuffer,
}

fn run(root: Edge, seed: Tensor) {
    let mut waiting = count_dependencies(&root.node);
    let mut ready = ReadyQueue::default();
    let mut buffer = empty_buffer(&root.node);
    buffer[root.input] = Some(seed);
    ready.push(root.node, buffer);
    while let Some((node, buffer)) = ready.pop() {
        let outputs = run_node(&node, buffer);
        // The results move on to the nodes that wait for them, by index.
        let next = node.next.borrow();
        for (output, edge) in outputs.into_iter().zip(next.iter()) {
            let Some(edge) = edge else { continue };
            let entry = waiting.entry(Rc::as_ptr(&edge.node)).or_default();
            if entry.buffer.is_empty() {
                entry.buffer = empty_buffer(&edge.node);
            }
            if let Some(output) = output {
                accumulate(&mut entry.buffer[edge.input], output);
            }
            entry.dependencies -= 1;
            if entry.dependencies == 0 {
                ready.push(Rc::clone(&edge.node), std::mem::take(&mut entry.buffer));
            }
        }
    }
}

/// Room for a gradient of each output of `node`.
fn empty_buffer(node: &Node) -> InputBuffer {
    smallvec![None; node.outputs.borrow().len()]
}

fn count_dependencies(root: &Rc<Node>) -> FxHashMap<*const Node, Waiting> {
    let mut waiting: FxHashMap<*const Node, Waiting> = FxHashMap::default();
    let mut pending = vec![Rc::clone(root)];
    while let Some(node) = pending.pop() {
        for edge in node.next.borrow().iter().flatten() {
            let entry = waiting.entry(Rc::as_ptr(&edge.node)).or_default();
            entry.dependencies += 1;
            if entry.dependencies == 1 {
                pending.push(Rc::clone(&edge.node));
            }
        }
    }
    waiting
}

/// Runs one node: unpack, compute, let go of the unpacked values, validate, let go of the incoming
/// gradients, release the saved values.
fn run_node(node: &Rc<Node>, grads: InputBuffer) -> Grads {
    let function = node.function.borrow();
    let function = match function.as_ref() {
        Some(Function::Accumulate(leaf)) => {
            accumulate_leaf(leaf, grads);
            return Vec::new();
        }
        Some(function) => function,
        None => return Vec::new(),
    };
    if grads.iter().all(Option::is_none) {
        node.saved.borrow_mut().drain(..).for_each(drop);
        return vec![None; node.next.borrow().len()];
    }
    for hook in &*node.pre_hooks.borrow() {
        hook();
    }
    let session = Rc::clone(grads.iter().flatten().next().expect("one gradient came").session());
    let scope = node.scope.unwrap_or_else(|| session.scope());
    session.in_scope(scope, || {
        let next = node.next.borrow();
        let mut unpacked: SmallVec<[Tensor; 2]> = node.saved.borrow().iter().map(Saved::unpack).collect();
        let mut grads = grads;
        let mut outputs = match function {
            Function::Operator(function) => function(&Call { grads: &grads, saved: &unpacked, next: &next }),
            Function::Custom(function) => {
                let owned = unpacked.drain(..).collect();
                let outputs = function(&Call { grads: &grads, saved: &[], next: &next }, owned);
                grads.drain(..).for_each(drop);
                outputs
            }
            Function::Accumulate(_) => Vec::new(),
        };
        // What was computed and is not wanted dies with the results, before the unpacked values.
        for (output, _) in outputs.iter_mut().zip(next.iter()).filter(|(_, edge)| edge.is_none()) {
            drop(output.take());
        }
        while let Some(value) = unpacked.pop() {
            drop(value);
        }
        for (output, edge) in outputs.iter_mut().zip(next.iter()) {
            if let (Some(gradient), Some(edge)) = (output.take(), edge) {
                let (shape, dtype) = edge.node.outputs.borrow()[edge.input];
                *output = Some(validate(gradient, shape, dtype));
            }
        }
        grads.into_iter().for_each(drop);
        node.saved.borrow_mut().drain(..).for_each(drop);
        outputs
    })
}

/// A gradient as its receiver wants it: summed to the receiver's shape, then cast to its dtype.
fn validate(mut gradient: Tensor, shape: Dims, dtype: Option<Dtype>) -> Tensor {
    if gradient.shape() != shape {
        gradient = gradient.sum_to(shape);
    }
    if let Some(dtype) = dtype.filter(|dtype| gradient.dtype() != *dtype) {
        gradient = gradient.to(dtype);
    }
    gradient
}

/// Adds `new` to a waiting gradient: in place where the older has no other owner.
fn accumulate(slot: &mut Option<Tensor>, new: Tensor) {
    *slot = match slot.take() {
        None => Some(new),
        Some(old) if old.is_sole_owner() && old.is_dense() && !old.is_view() => {
            drop(new);
            Some(old)
        }
        Some(old) => {
            let sum = old.add(&new);
            drop(old);
            drop(new);
            Some(sum)
        }
    };
}

/// Adds a gradient to the leaf's and runs the leaf's hooks.
fn accumulate_leaf(leaf: &Tensor, grads: InputBuffer) {
    let Some(gradient) = grads.into_iter().next().flatten() else { return };
    let after = leaf.hook_after_accumulator();
    let until_after = after.as_ref().map(|_| gradient.detach());
    // A gradient that is added to another one is done with before the hook runs.
    let gradient = if leaf.grad().is_none() {
        keep_gradient(leaf, &gradient);
        Some(gradient)
    } else {
        drop(gradient);
        None
    };
    if let Some(hook) = leaf.accumulated_hook() {
        hook();
    }
    drop(gradient);
    if let Some(hook) = after {
        hook();
    }
    drop(until_after);
}

/// The first gradient of a leaf: stolen where nothing else holds it and its layout is the leaf's, copied
/// otherwise.
fn keep_gradient(leaf: &Tensor, gradient: &Tensor) {
    let session = leaf.session();
    let category = session.gradient_category(leaf.object());
    let same_layout = (0..leaf.shape().len())
        .all(|dim| leaf.shape()[dim] == 1 || leaf.strides()[dim] == gradient.strides()[dim]);
    let kept = if gradient.handles() == 1 && same_layout {
        gradient.detach()
    } else {
        session.with_category(category, || {
            Tensor::strided(session, "grad", leaf.shape(), leaf.strides(), gradient.dtype())
        })
    };
    if let (Some(object), Some(like)) = (kept.object(), leaf.object()) {
        session.relabel(object, like, category);
    }
    leaf.set_grad(Some(kept));
}

/// A binary max-heap by sequence number. Ties come out as libstdc++'s `push_heap` and `pop_heap`
/// leave them, since that order decides which of two leaves is served first.
#[derive(Default)]
struct ReadyQueue {
    heap: Vec<(Rc<Node>, InputBuffer)>,
}

impl ReadyQueue {
    fn push(&mut self, node: Rc<Node>, buffer: InputBuffer) {
        let sequence = node.sequence;
        self.heap.push((node, buffer));
        self.sift_up(self.heap.len() - 1, 0, sequence);
    }

    /// Moves the element at `hole` up towards `top` while its parent is smaller.
    fn sift_up(&mut self, mut hole: usize, top: usize, sequence: u64) {
        while hole > top {
            let parent = (hole - 1) / 2;
            if self.heap[parent].0.sequence >= sequence {
                break;
            }
            self.heap.swap(parent, hole);
            hole = parent;
        }
    }

    fn pop(&mut self) -> Option<(Rc<Node>, InputBuffer)> {
        let last = self.heap.len().checked_sub(1)?;
        self.heap.swap(0, last);
        let top = self.heap.pop();
        // The element that was last sinks to the bottom along the larger children, then rises.
        let len = self.heap.len();
        if len > 1 {
            let sequence = self.heap[0].0.sequence;
            let mut hole = 0;
            loop {
                let right = 2 * hole + 2;
                let child = if right < len {
                    if self.heap[right].0.sequence < self.heap[right - 1].0.sequence {
                        right - 1
                    } else {
                        right
                    }
                } else if right == len {
                    right - 1
                } else {
                    break;
                };
                self.heap.swap(hole, child);
                hole = child;
            }
            self.sift_up(hole, 0, sequence);
        }
        top
    }
}
