//! Saved values, and activation checkpointing that is not reentrant.
//!
//! A checkpointed function keeps its arguments and none of what its operators save. The first saved
//! value that backward wants runs the function again; the run stops when the last value is saved.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ledger::{Category, Dtype};

use crate::session::{Scope, Session};
use crate::tensor::Tensor;

/// A value kept for backward.
pub(crate) enum Saved {
    /// The value itself.
    Value(Tensor),
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
}

/// A function that can be run again.
type Checkpointed = Box<dyn Fn(&[Tensor]) -> Tensor>;

/// One call of a checkpointed function.
pub(crate) struct Frame {
    function: Checkpointed,
    args: Vec<Tensor>,
    scope: Scope,
    autocast: Option<Dtype>,
    count: Cell<usize>,
    next: Cell<usize>,
    values: RefCell<Vec<Option<Tensor>>>,
    done: Cell<bool>,
}

impl Drop for Frame {
    /// What the function captured goes first, by the order of fields of the closure; then the arguments,
    /// the last one first.
    fn drop(&mut self) {
        self.function = Box::new(|args| args[0].clone());
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
                let value = if tensor.requires_grad() { tensor.detach() } else { tensor };
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
    let session = Rc::clone(frame.args[0].session());
    session.hooks.borrow_mut().push(SavedHook::HandOver(Rc::clone(frame)));
    session.recomputing.set(true);
    let run = || session.autocast(frame.autocast, || drop((frame.function)(&frame.args)));
    session.in_scope(frame.scope, || {
        session.with_grad(true, || session.with_category(Category::Activation, run));
    });
    session.recomputing.set(false);
    session.stopped.set(false);
    session.hooks.borrow_mut().pop();
}

/// Runs `function` over `args` without keeping what its operators save.
///
/// `args` and what `function` captures stay alive until the last saved value is let go.
pub fn checkpoint(args: Vec<Tensor>, function: impl Fn(&[Tensor]) -> Tensor + 'static) -> Tensor {
    let session = Rc::clone(args[0].session());
    let frame = Rc::new(Frame {
        function: Box::new(function),
        args,
        scope: session.scope(),
        autocast: session.autocast_dtype(),
        count: Cell::new(0),
        next: Cell::new(0),
        values: RefCell::default(),
        done: Cell::new(false),
    });
    session.hooks.borrow_mut().push(SavedHook::Forget(Rc::clone(&frame)));
    let result = (frame.function)(&frame.args);
    session.hooks.borrow_mut().pop();
    result
}
