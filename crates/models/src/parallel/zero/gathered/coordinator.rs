//! Which parameters are brought together when (`partitioned_param_coordinator.py`): the first pass is recorded, and
//! those after it fetch ahead of use along the record.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::rc::Rc;

use engine::{Collective, Tensor, release};

use super::{GATHER, Parts, Status};

/// The place of a module in a pass.
type Step = usize;

/// What is known of the order of modules.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Trace {
    #[default]
    Unknown,
    Recorded,
    Complete,
}

/// A gather that may not be done.
struct Gathering {
    params: Vec<usize>,
    /// The parts of several parameters, from which each is copied.
    flat: RefCell<Option<Tensor>>,
    /// What this rank sends of one, which goes once it is waited for, or another collective begins.
    sent: RefCell<Option<Tensor>>,
    is_complete: Cell<bool>,
}

/// The order of a pass, and where it is.
#[derive(Default)]
pub(super) struct Coordinator {
    trace: Trace,
    modules: Vec<usize>,
    uses: Vec<(usize, Step)>,
    queue: VecDeque<(usize, Step)>,
    step: Step,
    /// The last step for which a parameter was fetched.
    fetched_for: HashMap<usize, Step>,
    /// Elements of the parameters that are here.
    available: u64,
    inflight: BTreeMap<usize, Rc<Gathering>>,
    /// The modules that backward has reached and not left.
    in_backward: Vec<usize>,
    /// What was found to be released after a module at a step.
    released: HashMap<(usize, Step), BTreeSet<usize>>,
}

impl Parts {
    /// Before the forward pass of a micro-batch (`reset_step`).
    pub(super) fn begin(&self) {
        let inflight: Vec<usize> = self.coordinator.borrow().inflight.keys().copied().collect();
        for index in inflight {
            self.wait_for(index);
            self.let_go(index);
        }
        let mut this = self.coordinator.borrow_mut();
        match this.trace {
            Trace::Unknown => this.trace = Trace::Recorded,
            Trace::Recorded => {
                let modules = self.modules.borrow();
                let uses = |(at, module): (usize, &usize)| -> Vec<(usize, Step)> {
                    let mut own = modules[*module].clone();
                    own.sort_unstable();
                    own.into_iter().map(|param| (param, at)).collect()
                };
                let uses = this.modules.iter().enumerate().flat_map(uses).collect();
                this.uses = uses;
                this.trace = Trace::Complete;
            }
            Trace::Complete => {}
        }
        this.queue = this.uses.iter().copied().collect();
        this.fetched_for.clear();
        this.step = 0;
        this.available = 0;
    }

    /// Brings the parameters of `module` together, and some of those that come after it.
    pub(super) fn fetch(&self, module: usize, forward: bool) {
        {
            let mut this = self.coordinator.borrow_mut();
            let expected = this.modules.get(this.step).copied();
            if this.trace == Trace::Complete && expected != Some(module) {
                // Another order than the one recorded: the record is of no use.
                *this = Coordinator {
                    inflight: std::mem::take(&mut this.inflight),
                    in_backward: std::mem::take(&mut this.in_backward),
                    available: this.available,
                    step: this.step,
                    ..Coordinator::default()
                };
            }
            if this.trace == Trace::Recorded {
                this.modules.push(module);
            }
            if !forward && !this.in_backward.contains(&module) {
                this.in_backward.push(module);
            }
        }
        let own = self.modules.borrow()[module].clone();
        self.gather(&own);
        for index in &own {
            self.param(*index).users.borrow_mut().push(module);
            self.wait_for(*index);
        }
        if self.coordinator.borrow().trace == Trace::Complete {
            self.prefetch(&own);
        }
        self.coordinator.borrow_mut().step += 1;
    }

    /// Begins to gather what is not here of `wanted`.
    fn gather(&self, wanted: &[usize]) {
        let mut absent: Vec<usize> =
            wanted.iter().copied().filter(|index| self.param(*index).status.get() == Status::Part).collect();
        absent.sort_unstable();
        absent.dedup();
        if absent.is_empty() {
            return;
        }
        let mut elements = 0;
        for index in &absent {
            let param = self.param(*index);
            param.status.set(Status::Inflight);
            elements += param.numel;
        }
        let (flat, sent) = self.on(GATHER, || match &absent[..] {
            all if self.job.world == 1 => {
                all.iter().for_each(|index| self.take_part(&self.param(*index)));
                (None, None)
            }
            [one] => (None, self.gather_alone(&self.param(*one))),
            several => {
                let params: Vec<_> = several.iter().map(|index| self.param(*index)).collect();
                let parts: u64 = params.iter().map(|param| param.part_numel).sum();
                let flat = self.buffer("gathered_parts", parts * self.job.world, self.job.dtype);
                let copies: Vec<_> = params.iter().filter_map(|param| self.part_on_device(param)).collect();
                self.job.session.collective(Collective::AllGather, flat.nbytes());
                copies.into_iter().rev().for_each(drop);
                (Some(flat), None)
            }
        });
        self.begin_collective();
        let gathering = Rc::new(Gathering {
            params: absent.clone(),
            flat: RefCell::new(flat),
            sent: RefCell::new(sent),
            is_complete: Cell::new(false),
        });
        let mut this = self.coordinator.borrow_mut();
        this.available += elements;
        this.inflight.extend(absent.into_iter().map(|index| (index, Rc::clone(&gathering))));
    }

    /// What was sent before is let go.
    pub(super) fn begin_collective(&self) {
        for gathering in self.coordinator.borrow().inflight.values() {
            release!(gathering.sent.take());
        }
    }

    /// Waits for the gather of a parameter: all that came with it are copied out of the parts.
    fn wait_for(&self, index: usize) {
        let Some(gathering) = self.coordinator.borrow_mut().inflight.remove(&index) else { return };
        if !gathering.is_complete.replace(true) {
            release!(gathering.sent.take());
            for index in &gathering.params {
                let param = self.param(*index);
                if gathering.flat.borrow().is_some() {
                    let whole =
                        self.on(GATHER, || self.buffer("gathered", param.numel, param.tensor.dtype()));
                    param.tensor.move_into(&whole);
                }
                param.status.set(Status::Whole);
            }
        }
        // The parts die with the last that waits for them.
        release!(gathering);
    }

    /// Begins to gather what the record says comes next.
    fn prefetch(&self, own: &[usize]) {
        let options = &self.job.options;
        let mut wanted = Vec::new();
        {
            let mut this = self.coordinator.borrow_mut();
            let this = &mut *this;
            let fetched = |this: &Coordinator, index: &usize| {
                this.fetched_for.get(index).is_some_and(|step| *step >= this.step)
            };
            let unmet: BTreeSet<usize> = own.iter().copied().filter(|index| !fetched(this, index)).collect();
            let mut met = BTreeSet::new();
            while met.len() < unmet.len() {
                let Some((param, step)) = this.queue.pop_front() else { break };
                this.fetched_for.insert(param, step);
                met.insert(param);
            }
            let room = options.max_live_parameters.saturating_sub(this.available);
            let most = room.min(options.prefetch_bucket_size);
            let mut elements = 0;
            while options.prefetch_bucket_size > 0 && elements < most {
                let Some((index, step)) = this.queue.pop_front() else { break };
                let last = this.fetched_for.entry(index).or_insert(step);
                *last = (*last).max(step);
                let param = self.param(index);
                if param.status.get() == Status::Part && !wanted.contains(&index) {
                    wanted.push(index);
                    elements += param.numel;
                }
            }
        }
        self.gather(&wanted);
    }

    /// After `module` has run: what is not used again soon goes.
    pub(super) fn release(&self, module: usize, forward: bool) {
        let going = self.released_after(module);
        if !forward {
            self.coordinator.borrow_mut().in_backward.retain(|other| *other != module);
        }
        let own = self.modules.borrow()[module].clone();
        for index in own {
            self.param(index).users.borrow_mut().retain(|user| *user != module);
            if going.contains(&index) {
                self.let_go(index);
            }
        }
    }

    /// The parameters of `module` that go after it.
    fn released_after(&self, module: usize) -> BTreeSet<usize> {
        let mut this = self.coordinator.borrow_mut();
        let modules = self.modules.borrow();
        let own = modules[module].iter().copied();
        if this.trace != Trace::Complete {
            return own.collect();
        }
        let key = (module, this.step);
        if let Some(known) = this.released.get(&key) {
            return known.clone();
        }
        let again = |index: &usize| this.fetched_for.get(index).is_some_and(|step| *step > this.step);
        let mut going: BTreeSet<usize> =
            own.filter(|index| !self.param(*index).persists && !again(index)).collect();
        let mut elements = 0;
        for next in this.modules.iter().skip(this.step) {
            if elements >= self.job.options.max_reuse_distance {
                break;
            }
            for index in &modules[*next] {
                going.remove(index);
                elements += self.param(*index).numel;
            }
        }
        this.released.insert(key, going.clone());
        going
    }

    /// A parameter goes, if it is here and nobody uses it.
    fn let_go(&self, index: usize) {
        let param = self.param(index);
        if param.status.get() == Status::Whole && param.users.borrow().is_empty() {
            self.free(&param);
            let mut this = self.coordinator.borrow_mut();
            this.available = this.available.saturating_sub(param.numel);
        }
    }

    /// After backward: modules whose input wanted no gradient are left.
    pub(super) fn release_leftovers(&self) {
        loop {
            let Some(module) = self.coordinator.borrow_mut().in_backward.pop() else { break };
            let own = self.modules.borrow()[module].clone();
            for index in own {
                let param = self.param(index);
                param.users.borrow_mut().retain(|user| *user != module);
                if !param.persists {
                    self.let_go(index);
                }
            }
        }
    }

    /// Before an update: everything goes.
    pub(super) fn release_all(&self) {
        let count = self.params.borrow().len();
        for index in 0..count {
            self.wait_for(index);
            self.param(index).users.borrow_mut().clear();
            self.let_go(index);
        }
    }
}
