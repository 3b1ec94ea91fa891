//! Activation checkpointing: saved values that are computed again in backward.
//!
//! A checkpointed function keeps its arguments and none of what its operators save. The first saved
//! value that backward wants runs the function again; the run stops when the last value is saved.
//! A selective checkpoint keeps the results of some operators besides, which that run takes instead
//! of computing them.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use ledger::{Category, Dtype};

use crate::graph::{Op, backward_from};
use crate::host::{OnHost, Pinning};
use crate::session::{Scope, Session};
use crate::tensor::Tensor;

/// The operators whose results a selective checkpoint can keep, under their names in `torch.ops.aten`.
pub const KEEPABLE: &[&str] = &[
    "mm",
    "addmm",
    "bmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_softmax",
    "native_layer_norm",
    "silu",
    "gelu",
    "relu",
    "tanh",
];

/// How a function is run again in backward.
#[derive(Clone, Debug, Default)]
pub enum Recompute {
    /// Whenever the first of its saved values is wanted, up to the last of them.
    #[default]
    Values,
    /// So, but for the results of these operators of [`KEEPABLE`], which are kept.
    AllBut(Rc<[&'static str]>),
    /// Whole, in the backward of one node around it, which then runs backward through it (reentrant).
    Reentrant,
}

/// A value kept for backward.
pub(crate) enum Saved {
    /// The value itself.
    Value(Tensor),
    /// A copy of it in host memory.
    OnHost(OnHost),
    /// Number `index` of the values that running `frame` again gives.
    Recomputed { frame: Rc<Frame>, index: usize },
}

/// What happens to a value that an operator saves.
#[derive(Clone)]
pub(crate) enum SavedHook {
    /// It is forgotten, to be computed again.
    Forget(Rc<Frame>),
    /// It is handed to the saved value that waits for it.
    HandOver(Rc<Frame>),
    /// It is copied to the host.
    Host(Pinning),
}

/// A function that can be run again.
type Checkpointed = Box<dyn Fn(&[Tensor]) -> Tensor>;

/// A checkpointed function and what it runs under.
struct Call {
    function: Checkpointed,
    scope: Scope,
    autocast: Option<Dtype>,
}

impl Call {
    fn new(session: &Session, function: impl Fn(&[Tensor]) -> Tensor + 'static) -> Self {
        Self { function: Box::new(function), scope: session.scope(), autocast: session.autocast_dtype() }
    }

    /// Runs the function again, over `args`, as in the forward pass.
    fn again(&self, args: &[Tensor]) -> Tensor {
        let session = Rc::clone(args[0].session());
        session.recomputing.set(true);
        let run = || session.autocast(self.autocast, || (self.function)(args));
        let result = session.in_scope(self.scope, || {
            session.with_grad(true, || session.with_category(Category::Activation, run))
        });
        session.recomputing.set(false);
        result
    }

    /// What the function captured dies, by the order of fields of the closure.
    fn release_function(&mut self) {
        self.function = Box::new(|args| args[0].clone());
    }
}

/// One call of a checkpointed function whose values are computed again.
pub(crate) struct Frame {
    call: Call,
    args: Vec<Saved>,
    count: Cell<usize>,
    next: Cell<usize>,
    values: RefCell<Vec<Option<Tensor>>>,
    done: Cell<bool>,
    kept: Vec<Kept>,
}

/// The results of an operator in a selective checkpoint, the oldest first.
struct Kept {
    operator: &'static str,
    results: RefCell<VecDeque<Box<dyn Any>>>,
}

impl Drop for Frame {
    /// Kept results go first, then what the function captured, then the arguments, the last one first.
    fn drop(&mut self) {
        self.kept.clear();
        self.call.release_function();
        while let Some(argument) = self.args.pop() {
            drop(argument);
        }
    }
}

impl Saved {
    pub(crate) fn pack(session: &Session, tensor: Tensor) -> Self {
        let hook = session.hooks.borrow().last().cloned();
        match hook {
            None => {
                if let Some(object) = tensor.object() {
                    session.note_saved(object);
                }
                Self::Value(tensor)
            }
            Some(SavedHook::Host(pinning)) => Self::OnHost(OnHost::pack(&tensor, pinning)),
            Some(SavedHook::Forget(frame)) => {
                let index = frame.count.get();
                frame.count.set(index + 1);
                frame.values.borrow_mut().push(None);
                Self::Recomputed { frame, index }
            }
            Some(SavedHook::HandOver(frame)) => {
                if session.stopped.get() {
                    return Self::Value(tensor);
                }
                if let Some(object) = tensor.object() {
                    session.note_saved(object);
                }
                let value = if tensor.requires_grad() { tensor.held() } else { tensor };
                let index = frame.next.get();
                frame.next.set(index + 1);
                frame.values.borrow_mut()[index] = Some(value.clone());
                if index + 1 == frame.count.get() {
                    session.stopped.set(true);
                }
                Self::Value(value)
            }
        }
    }

    /// The value. One that was recomputed is handed out: the caller is its only owner from then on.
    pub(crate) fn unpack(&self) -> Tensor {
        match self {
            Self::Value(tensor) => tensor.clone(),
            Self::OnHost(copy) => copy.unpack(),
            Self::Recomputed { frame, index } => {
                if !frame.done.replace(true) {
                    recompute(frame);
                }
                frame.values.borrow_mut()[*index].take().expect("a saved value is unpacked once")
            }
        }
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        if let Self::Recomputed { frame, index } = self {
            let value = frame.values.borrow_mut()[*index].take();
            drop(value);
        }
    }
}

fn recompute(frame: &Rc<Frame>) {
    let args: Vec<Tensor> = frame.args.iter().map(Saved::unpack).collect();
    let session = Rc::clone(args[0].session());
    session.hooks.borrow_mut().push(SavedHook::HandOver(Rc::clone(frame)));
    drop(frame.call.again(&args));
    session.stopped.set(false);
    session.hooks.borrow_mut().pop();
}

/// Runs `function` over `args` without keeping what its operators save.
///
/// `args` and what `function` captures stay alive until the last saved value is let go, of a reentrant
/// checkpoint until its node is.
pub fn checkpoint(
    how: &Recompute,
    args: Vec<Tensor>,
    function: impl Fn(&[Tensor]) -> Tensor + 'static,
) -> Tensor {
    let session = Rc::clone(args[0].session());
    let kept = match how {
        Recompute::Reentrant => return reentrant(args, function),
        Recompute::Values => [].as_slice(),
        Recompute::AllBut(operators) => operators,
    };
    let keep = |&operator: &&'static str| Kept { operator, results: RefCell::default() };
    let frame = Rc::new(Frame {
        call: Call::new(&session, function),
        args: args.iter().map(|argument| Saved::pack(&session, argument.clone())).collect(),
        count: Cell::new(0),
        next: Cell::new(0),
        values: RefCell::default(),
        done: Cell::new(false),
        kept: kept.iter().map(keep).collect(),
    });
    session.hooks.borrow_mut().push(SavedHook::Forget(Rc::clone(&frame)));
    let result = (frame.call.function)(&args);
    session.hooks.borrow_mut().pop();
    result
}

/// The function runs without a graph; the node around it keeps the arguments.
fn reentrant(args: Vec<Tensor>, function: impl Fn(&[Tensor]) -> Tensor + 'static) -> Tensor {
    let session = Rc::clone(args[0].session());
    let op = Op::new(&session, &args.iter().collect::<Vec<_>>());
    let call = Call::new(&session, function);
    let result = session.with_grad(false, || (call.function)(&args));
    let wants: Vec<bool> = args.iter().map(Tensor::requires_grad).collect();
    args.iter().for_each(|argument| op.save(argument));
    drop(args);
    op.finish_custom(result, move |outer, saved| {
        let inputs: Vec<Tensor> = saved.iter().map(Tensor::detach).collect();
        for (input, _) in inputs.iter().zip(&wants).filter(|(_, wants)| **wants) {
            input.set_requires_grad();
        }
        let output = call.again(&inputs);
        backward_from(&output, outer.grad());
        let grads = inputs.iter().map(Tensor::grad).collect();
        crate::release!(saved, inputs, output);
        grads
    })
}

/// What an operator gives: a tensor or several.
pub(crate) trait Results: 'static {
    /// The same memory without history.
    fn detached(&self) -> Self;
    /// Notes that it is kept for backward.
    fn note_saved(&self, session: &Session);
}

impl Results for Tensor {
    fn detached(&self) -> Self {
        self.detach()
    }

    fn note_saved(&self, session: &Session) {
        if let Some(object) = self.object() {
            session.note_saved(object);
        }
    }
}

impl<T: Results> Results for Option<T> {
    fn detached(&self) -> Self {
        self.as_ref().map(T::detached)
    }

    fn note_saved(&self, session: &Session) {
        if let Some(results) = self {
            results.note_saved(session);
        }
    }
}

impl<A: Results, B: Results> Results for (A, B) {
    fn detached(&self) -> Self {
        (self.0.detached(), self.1.detached())
    }

    fn note_saved(&self, session: &Session) {
        self.0.note_saved(session);
        self.1.note_saved(session);
    }
}

impl<A: Results, B: Results, C: Results> Results for (A, B, C) {
    fn detached(&self) -> Self {
        (self.0.detached(), self.1.detached(), self.2.detached())
    }

    fn note_saved(&self, session: &Session) {
        self.0.note_saved(session);
        self.1.note_saved(session);
        self.2.note_saved(session);
    }
}

impl Session {
    /// What `operator` of [`KEEPABLE`] gives: what `compute` does, or in a recomputation what a selective
    /// checkpoint has kept of it.
    pub(crate) fn results_of<R: Results>(&self, operator: &'static str, compute: impl FnOnce() -> R) -> R {
        let Some((frame, index, again)) = self.kept(operator) else { return compute() };
        let kept = &frame.kept[index].results;
        if again {
            let results = kept.borrow_mut().pop_front().and_then(|kept| kept.downcast().ok());
            return *results.expect("a function calls its operators in the same order again");
        }
        let results = compute();
        results.note_saved(self);
        kept.borrow_mut().push_back(Box::new(results.detached()));
        results
    }

    /// Whether operators run under a dispatch mode, as those of a selective checkpoint do.
    pub(crate) fn is_intercepted(&self) -> bool {
        let hooks = self.hooks.borrow();
        let frame = match hooks.last() {
            Some(SavedHook::Forget(frame) | SavedHook::HandOver(frame)) => frame,
            Some(SavedHook::Host(_)) | None => return false,
        };
        !frame.kept.is_empty()
    }

    /// The checkpoint that keeps the results of `operator`, where one does, their index in it, and whether
    /// it is being run again.
    fn kept(&self, operator: &str) -> Option<(Rc<Frame>, usize, bool)> {
        let hooks = self.hooks.borrow();
        let (frame, again) = match hooks.last().filter(|_| !self.stopped.get())? {
            SavedHook::Forget(frame) => (frame, false),
            SavedHook::HandOver(frame) => (frame, true),
            SavedHook::Host(_) => return None,
        };
        let index = frame.kept.iter().position(|kept| kept.operator == operator)?;
        Some((Rc::clone(frame), index, again))
    }
}
