//! What a stack tells of the moment it is from: what was at work, and on whose thread.

use std::borrow::Cow;

use crate::snapshot::{Frame, Snapshot, Stack, is_native};

/// What was at work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Work {
    /// Nothing that is known: the program itself, its data, its logging.
    #[default]
    Program,
    /// A module is called.
    Forward,
    /// The call that begins a backward pass.
    Backward,
    /// The optimizer's step.
    Step,
    /// What belongs to an update besides: clipping, unscaling.
    Clip,
    /// Gradients are let go of.
    ZeroGrad,
    /// Modules are made, moved or loaded.
    Load,
    /// The state of an optimizer is loaded.
    LoadState,
}

/// Who runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Thread {
    /// There is no stack of the program's own language.
    #[default]
    Unknown,
    /// The program.
    Program,
    /// Autograd, which has threads of its own: hooks, functions written in Python, recomputation.
    Autograd,
}

/// What one stack tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Role {
    pub(super) work: Work,
    pub(super) thread: Thread,
    /// The innermost frame of the program's own files.
    pub(super) program: Option<Frame>,
    /// Whether the innermost frame that says something is of the collectives of several devices.
    pub(super) collective: bool,
    /// Whether what a group of devices shares is put together here for use: a whole parameter.
    pub(super) gathers: bool,
}

/// The parts of paths that libraries are in.
const LIBRARIES: [&str; 6] =
    ["/site-packages/", "/dist-packages/", "/lib/python", "/torch/", "/torchinductor_", "<frozen "];

/// Where a thread of a program begins.
const ROOTS: [&str; 5] = ["<module>", "_bootstrap", "_bootstrap_inner", "_run_module_as_main", "_run_code"];

/// Files in which sharded parameters are put together.
const GATHERING: [&str; 4] =
    ["_fsdp_param.py", "fsdp/flat_param.py", "fsdp/_flat_param.py", "zero/partition_parameters.py"];

impl Role {
    /// What `stack` tells.
    pub(super) fn of(snapshot: &Snapshot, stack: Stack) -> Self {
        let mut role = Self::default();
        let mut root: Option<(bool, &str)> = None;
        let mut native = false;
        for frame in snapshot.stack(stack) {
            let (file, name) = (snapshot.text(frame.file), snapshot.text(frame.name));
            let file =
                &*if file.contains('\\') { file.replace('\\', "/").into() } else { Cow::Borrowed(file) };
            if is_native(file, name) {
                native |= name.contains("autograd::Engine") || name.contains("AccumulateGrad");
                continue;
            }
            root = Some((file.contains("/torch/"), name));
            let library = is_library(file);
            if role.program.is_none() && !library {
                role.program = Some(*frame);
            }
            // The innermost wins: a step may run a closure with the whole pass, and a module may train.
            if role.work == Work::Program {
                role.work = work(file, name).unwrap_or_default();
            }
        }
        role.thread = match root {
            Some((true, name)) if !ROOTS.contains(&name) => Thread::Autograd,
            Some(_) => Thread::Program,
            None if native => Thread::Autograd,
            None => Thread::Unknown,
        };
        if let Some(first) = snapshot.telling_frames(stack).next() {
            let file = snapshot.text(first.file);
            role.gathers = GATHERING.iter().any(|place| file.ends_with(place));
            role.collective = !role.gathers
                && (file.contains("torch/distributed/")
                    || file.contains("deepspeed/runtime/")
                    || file.ends_with("torch/nn/parallel/distributed.py"));
        }
        role
    }

    /// Whether the program itself runs, outside of everything known.
    pub(super) fn is_plain(&self) -> bool {
        self.work == Work::Program && self.thread == Thread::Program
    }
}

/// Whether `file` is a library's and not the program's own.
fn is_library(file: &str) -> bool {
    file.is_empty() || LIBRARIES.iter().any(|part| file.contains(part)) || file.starts_with('<')
}

/// The work that a frame in `file` called `name` is of.
fn work(file: &str, name: &str) -> Option<Work> {
    let stem = file.rsplit(['/', '\\']).next().unwrap_or(file).trim_end_matches(".py");
    let optimizers = file.contains("/optim/") || file.contains("/optimizers/") || stem.contains("optim");
    Some(match name {
        "zero_grad" => Work::ZeroGrad,
        // Some make their state before the first step.
        "__init__" | "load_state_dict" if optimizers && !stem.contains("scheduler") => Work::LoadState,
        _ if optimizers && !stem.contains("scheduler") && (name == "step" || name.ends_with("_step")) => {
            Work::Step
        }
        // `Optimizer.step` of any class goes through this one.
        "wrapper" if file.ends_with("torch/optim/optimizer.py") => Work::Step,
        "_take_model_step" => Work::Step,
        "step" if file.contains("deepspeed/runtime/zero/") => Work::Step,
        "_unscale_grads_" | "unscale_" => Work::Clip,
        _ if name.starts_with("clip_grad") => Work::Clip,
        "backward" if file.ends_with("torch/_tensor.py") => Work::Backward,
        "backward" | "grad" | "_engine_run_backward" | "_make_grads" if file.contains("torch/autograd/") => {
            Work::Backward
        }
        "_apply" | "load_state_dict" if file.ends_with("nn/modules/module.py") => Work::Load,
        "from_pretrained" | "from_config" | "from_single_file" => Work::Load,
        "reset_parameters" | "__init__" if file.contains("/nn/modules/") => Work::Load,
        _ if file.ends_with("torch/nn/init.py") => Work::Load,
        _ if file.ends_with("nn/modules/module.py") && CALLS.contains(&name) => Work::Forward,
        _ => return None,
    })
}

/// The functions through which a module is called.
const CALLS: [&str; 4] = ["_call_impl", "_wrapped_call_impl", "__call__", "_slow_forward"];

/// The branch of a walk over modules that an object was made in: the innermost frame of a function that
/// calls itself. A module that is moved is such a walk, however deep. None where no function does.
pub(super) fn walk(snapshot: &Snapshot, stack: Stack) -> Option<Frame> {
    let python = |frame: &&Frame| !is_native(snapshot.text(frame.file), snapshot.text(frame.name));
    let frames: Vec<Frame> = snapshot.stack(stack).filter(python).copied().collect();
    let moves = |frame: &Frame| {
        snapshot.text(frame.name) == "_apply" && snapshot.text(frame.file).ends_with("nn/modules/module.py")
    };
    let same = |a: &Frame, b: &Frame| (a.file, a.name) == (b.file, b.name);
    let calls_itself =
        |at: &usize| moves(&frames[*at]) || frames.get(at + 1).is_some_and(|next| same(&frames[*at], next));
    (0..frames.len()).find(calls_itself).map(|at| frames[at])
}

/// The frames from the line on that called for a backward pass, innermost first; none where `stack` is
/// of no such call.
pub(super) fn call_of_backward(snapshot: &Snapshot, stack: Stack) -> Option<Vec<Frame>> {
    let calls =
        |frame: &Frame| work(snapshot.text(frame.file), snapshot.text(frame.name)) == Some(Work::Backward);
    let frames: Vec<Frame> = snapshot.stack(stack).copied().collect();
    let last = frames.iter().rposition(calls)?;
    Some(frames[last + 1..].to_vec()).filter(|frames| !frames.is_empty())
}

/// The frame that calls the outermost module at work; none where no module is.
pub(super) fn caller_of_modules(snapshot: &Snapshot, stack: Stack) -> Option<Frame> {
    let calls =
        |frame: &Frame| work(snapshot.text(frame.file), snapshot.text(frame.name)) == Some(Work::Forward);
    let frames: Vec<Frame> = snapshot.stack(stack).copied().collect();
    let last = frames.iter().rposition(calls)?;
    frames.get(last + 1).copied()
}
