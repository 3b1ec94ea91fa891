//! The optimizer of stage 3 (`stage3.py`): partitions of the parts, and the update.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use engine::{Collective, Tensor, release};
use ledger::{Category, Dtype};

use super::super::{Strategy, checks};
use super::reduction::Bucket;
use super::{Parts, REDUCTION, list};
use crate::optim::{List, Optimizer};

/// Parameters of a rank that are stepped together are of so many elements (`sub_group_size`).
const SUB_GROUP: u64 = 1_000_000_000;

/// Parts that are stepped together.
struct Group {
    params: Vec<usize>,
    numel: u64,
    master: Tensor,
    optimizer: RefCell<Optimizer>,
}

/// The optimizer of stage 3.
pub(in crate::parallel::zero) struct Gathered {
    pub(super) parts: Rc<Parts>,
    groups: Vec<Group>,
    pub(super) bucket: RefCell<Bucket>,
    pub(super) last: Cell<bool>,
    /// Whether a micro-batch before this one has left gradients.
    pub(super) accumulates: Cell<bool>,
    /// The norms of gradients that went to the host.
    pub(super) norms: RefCell<Vec<Tensor>>,
    global_norm: RefCell<Option<Tensor>>,
    /// Parts, gradients and trackers that live as long as the optimizer.
    _kept: Vec<Tensor>,
}

impl Gathered {
    /// Makes the partitions of `parts`, whose parameters among `trained` are stepped.
    pub(in crate::parallel::zero) fn wrap(parts: Rc<Parts>, trained: &[Tensor]) -> Rc<Self> {
        let job = parts.job.clone();
        let session = &job.session;
        for param in parts.params.borrow().iter() {
            param.is_trained.set(trained.iter().any(|tensor| tensor.same(&param.tensor)));
        }
        let count = parts.params.borrow().len();
        let stepped: Vec<usize> = (0..count).filter(|index| parts.param(*index).is_trained.get()).collect();
        let elements =
            |indices: &[usize]| -> u64 { indices.iter().map(|index| parts.param(*index).part_numel).sum() };
        let make =
            |what, category, count: u64, dtype| Tensor::of_category(session, what, category, [count], dtype);
        let make_state = |what, category, count: u64, dtype| {
            let place = if job.offloads_optimizer { Tensor::of_host } else { Tensor::of_category };
            place(session, what, category, list(count), dtype)
        };
        let mut kept = vec![make_state("overflow", Category::Workspace, 1, Dtype::Bool)];
        let barrier = || make("barrier", Category::Workspace, 1, Dtype::Uint8);
        let first = barrier();
        kept.push(make("barrier", Category::Workspace, 1, Dtype::Fp32));
        release!(first);
        // The parts are brought together.
        let total = elements(&stepped);
        let free = |index: &usize| release!(parts.param(*index).part.take());
        let flat = if job.offloads_parameters {
            let flat = Tensor::of_host(session, "parts", Category::Parameter, [total], job.dtype);
            stepped.iter().for_each(free);
            flat
        } else {
            stepped.iter().for_each(free);
            make("parts", Category::Parameter, total, job.dtype)
        };
        let mut groups: Vec<Vec<usize>> = Vec::new();
        let mut open = Vec::new();
        for index in &stepped {
            open.push(*index);
            if elements(&open) >= SUB_GROUP {
                groups.push(std::mem::take(&mut open));
            }
        }
        groups.extend((!open.is_empty()).then_some(open));
        let group = |params: Vec<usize>| {
            let numel = elements(&params);
            let converted = (job.dtype != Dtype::Fp32)
                .then(|| make_state("master", Category::Temporary, numel, Dtype::Fp32));
            let master = make_state("master", Category::MasterWeight, numel, Dtype::Fp32);
            release!(converted);
            let optimizer = RefCell::new(Optimizer::new(job.form, std::slice::from_ref(&master)));
            Group { params, numel, master, optimizer }
        };
        let groups: Vec<Group> = groups.into_iter().map(group).collect();
        release!(barrier());
        let largest = groups.iter().map(|group| group.numel).max().unwrap_or(0);
        let gradients = make_state("gradients", Category::Gradient, largest, Dtype::Fp32);
        if job.offloads_optimizer {
            kept.push(gradients);
        } else {
            release!(gradients);
        }
        release!(barrier());
        let mut bucket = Bucket::default();
        if job.options.contiguous_gradients {
            bucket.buffer = Some(parts.buffer("reduce_bucket", job.options.reduce_bucket_size, job.dtype));
        }
        kept.push(make_state("gradient_partitions", Category::Gradient, total, job.accumulated()));
        parts.flat.replace(Some(flat));
        for index in &stepped {
            let param = parts.param(*index);
            release!(parts.gather_alone(&param));
            param.tensor.move_into(&parts.nothing);
        }
        let this = Rc::new(Self {
            parts,
            groups,
            bucket: RefCell::new(bucket),
            last: Cell::new(false),
            accumulates: Cell::new(false),
            norms: RefCell::default(),
            global_norm: RefCell::default(),
            _kept: kept,
        });
        for index in stepped {
            let gathered = Rc::clone(&this);
            let hook = move || gathered.gradient_came(index);
            this.parts.param(index).tensor.on_accumulated(Some(Rc::new(hook)));
        }
        this
    }

    /// The norm of the gradients of each group.
    fn norms(&self) -> Vec<Tensor> {
        let job = &self.parts.job;
        let part = |index: &usize| {
            let count = self.parts.param(*index).part_numel;
            Tensor::without_storage(&job.session, list(count), job.accumulated(), false)
        };
        let of_group = |group: &Group| {
            let gradients: Vec<Tensor> = group.params.iter().map(part).collect();
            checks::norm_of_parts(&job.session, &gradients)
        };
        self.groups.iter().map(of_group).collect()
    }

    fn step_group(&self, group: &Group, norm: Option<&Tensor>) {
        let job = &self.parts.job;
        let make =
            |what, dtype| Tensor::of_category(&job.session, what, Category::Gradient, [group.numel], dtype);
        if !job.offloads_optimizer {
            let joined = (group.params.len() > 1).then(|| make("gradient_partition", job.accumulated()));
            let single = match joined {
                Some(joined) if job.accumulated() == Dtype::Fp32 => joined,
                joined => {
                    let wide = make("gradient_partition", Dtype::Fp32);
                    release!(joined);
                    wide
                }
            };
            group.master.set_grad(Some(single));
        }
        if let Some(norm) = norm.filter(|_| job.clips) {
            checks::scale_and_clip(norm);
        }
        group.optimizer.borrow_mut().step();
        if job.offloads_optimizer {
            job.session.add_traffic(0, group.numel * job.dtype.size());
        } else {
            group.master.set_grad(None);
        }
    }

    /// Small parameters are brought together for the next step.
    fn gather_persistent(&self) {
        let parts = &self.parts;
        let params: Vec<_> = parts.params.borrow().iter().filter(|param| param.persists).cloned().collect();
        let absent: Vec<_> =
            params.into_iter().filter(|param| param.status.get() == super::Status::Part).collect();
        if parts.job.world == 1 && absent.len() > 1 {
            for param in absent {
                parts.take_part(&param);
                param.status.set(super::Status::Whole);
            }
            return;
        }
        let sent: List = absent.iter().filter_map(|param| parts.part_on_device(param)).collect();
        let gathered: Vec<Tensor> = absent
            .iter()
            .map(|param| {
                let count = param.padded(parts.job.world);
                parts.buffer("gathered", count, param.tensor.dtype())
            })
            .collect();
        for (param, whole) in absent.iter().zip(gathered) {
            parts.job.session.collective(Collective::AllGather, whole.nbytes());
            param.tensor.move_into(&whole);
            param.status.set(super::Status::Whole);
        }
        // A name of its own has the last of them.
        let last = sent.last().cloned();
        release!(sent, last);
    }
}

impl Strategy for Gathered {
    fn begin_forward(&self) {
        self.parts.begin();
    }

    fn begin_backward(&self, last: bool) {
        self.last.set(last);
    }

    fn end_backward(&self) {
        self.reduce();
        self.parts.release_leftovers();
        self.accumulates.set(!self.last.get());
    }

    fn step(&self) {
        let job = &self.parts.job;
        self.parts.release_all();
        if job.dtype == Dtype::Fp16 {
            let total: u64 = self.groups.iter().map(|group| group.numel).sum();
            self.parts.on(REDUCTION, || {
                checks::overflow_of_partition(&job.session, total, job.accumulated(), job.offloads_optimizer);
            });
        }
        if job.offloads_optimizer {
            let norms = self.norms.take();
            checks::norm_of_host(&job.session, &norms);
            norms.into_iter().for_each(drop);
            self.groups.iter().for_each(|group| self.step_group(group, None));
            self.gather_persistent();
            return;
        }
        let of_groups = self.norms();
        let norm = checks::combined(&of_groups);
        checks::validate(&norm);
        let told = Tensor::of_category(&job.session, "gradient_norm", Category::Temporary, [], norm.dtype());
        self.groups.iter().for_each(|group| self.step_group(group, Some(&norm)));
        self.gather_persistent();
        release!(norm);
        of_groups.into_iter().rev().for_each(drop);
        release!(self.global_norm.replace(Some(told)));
    }
}
