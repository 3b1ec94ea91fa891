//! Stages 1 and 2 (`stage_1_and_2.py`): all parameters in one flat buffer, of which each rank steps a partition.

mod reduction;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use engine::{Collective, Dims, Tensor, release};
use ledger::{Category, Dtype};

use super::layout::Layout;
use super::{Job, Stage, Strategy, checks};
use crate::optim::{List, Optimizer};
use reduction::Bucket;

/// The optimizer of stages 1 and 2.
pub(super) struct Flat {
    job: Job,
    layout: Layout,
    parameters: Vec<Tensor>,
    /// What the parameters are views of.
    flat: Tensor,
    /// This rank's partition in fp32.
    master: Tensor,
    optimizer: RefCell<Optimizer>,
    /// The last micro-batch before the update runs.
    last: Cell<bool>,
    bucket: RefCell<Bucket>,
    /// Gradients added up in a dtype of their own, by parameter (`grad_accum`).
    sums: RefCell<Vec<Option<Tensor>>>,
    /// The gradients of the parameters of which a part lies in the partition.
    in_partition: RefCell<Option<Tensor>>,
    /// The same, kept from the first micro-batch on.
    kept: RefCell<Option<List>>,
    /// The gradients of the partition.
    averaged: RefCell<Option<Averaged>>,
    /// The norms of gradients that went to the host, and how many micro-batches have come.
    offloaded: RefCell<Vec<Tensor>>,
    global_norm: RefCell<Option<Tensor>>,
    /// Where a gradient waits on its way to the host.
    _staging: Option<Tensor>,
    _host: Vec<Tensor>,
}

/// The gradients of the partition: pieces of those of parameters, or of one buffer.
struct Averaged {
    pieces: List,
    /// How many of them are of parameters; padding comes behind.
    of_parameters: usize,
    buffer: Option<Tensor>,
}

impl Flat {
    /// Makes the flat buffer of `parameters`, this rank's partition in fp32, and an optimizer over it.
    pub(super) fn wrap(job: Job, parameters: &[Tensor]) -> Rc<Self> {
        let numels: Vec<u64> = parameters.iter().map(Tensor::numel).collect();
        let ranks = (job.rank, job.world);
        let layout = Layout::new(&numels, ranks, job.options.round_robin_gradients);
        let session = &job.session;
        let make =
            |what, category, count: u64, dtype| Tensor::of_category(session, what, category, [count], dtype);
        let flat = layout.flatten(&job, parameters, true);
        let own = layout.partition;
        let clone = make("zero.partition", Category::Temporary, own, job.dtype);
        let mut host = Vec::new();
        let mut staging = None;
        let master = if job.offloads_optimizer {
            let on_host = |what, category, dtype| Tensor::of_host(session, what, category, [own], dtype);
            let master = on_host("master", Category::MasterWeight, Dtype::Fp32);
            release!(clone);
            host.push(on_host("offloaded_parameters", Category::Parameter, job.dtype));
            host.push(on_host("offloaded_gradients", Category::Gradient, Dtype::Fp32));
            let largest = numels.iter().copied().max().unwrap_or(0);
            let waiting = "offload_buffer";
            host.push(Tensor::of_host(session, waiting, Category::Workspace, [largest], job.dtype));
            staging = Some(make(waiting, Category::Workspace, largest, job.dtype));
            master
        } else if job.dtype == Dtype::Fp32 {
            clone.become_category(Category::MasterWeight);
            release!(make("zero.gradient", Category::Temporary, own, Dtype::Fp32));
            clone
        } else {
            let master = make("master", Category::MasterWeight, own, Dtype::Fp32);
            release!(clone);
            release!(make("zero.gradient", Category::Temporary, own, Dtype::Fp32));
            master
        };
        let optimizer = Optimizer::new(job.form, std::slice::from_ref(&master));
        let this = Rc::new(Self {
            layout,
            parameters: parameters.to_vec(),
            flat,
            master,
            optimizer: RefCell::new(optimizer),
            last: Cell::new(false),
            bucket: RefCell::default(),
            sums: RefCell::new(vec![None; parameters.len()]),
            in_partition: RefCell::default(),
            kept: RefCell::default(),
            averaged: RefCell::default(),
            offloaded: RefCell::default(),
            global_norm: RefCell::default(),
            _staging: staging,
            _host: host,
            job,
        });
        for (index, parameter) in parameters.iter().enumerate() {
            let flat = Rc::clone(&this);
            parameter.on_accumulated(Some(Rc::new(move || flat.gradient_came(index))));
        }
        this
    }

    /// Whether micro-batches are added up in fp32 and the weights are not: the partition has a buffer for it.
    fn sums_in_buffer(&self) -> bool {
        self.job.accumulated() == Dtype::Fp32 && self.job.dtype != Dtype::Fp32
    }

    /// Whether each parameter has such a sum of its own.
    fn sums_by_parameter(&self) -> bool {
        self.job.options.stage == Stage::One && self.job.accumulated() != self.job.dtype
    }

    /// The gradient that is to be reduced.
    fn gradient(&self, index: usize) -> Option<Tensor> {
        if self.sums_by_parameter() {
            self.sums.borrow()[index].clone()
        } else {
            self.parameters[index].grad()
        }
    }

    fn clear_gradient(&self, index: usize) {
        if self.sums_by_parameter() {
            let old = self.sums.borrow_mut()[index].take();
            drop(old);
        } else {
            self.parameters[index].set_grad(None);
        }
    }

    /// The buffer of the partition's gradients, made when it is first wanted.
    fn buffer(&self) -> Tensor {
        if let Some(Averaged { buffer: Some(buffer), .. }) = &*self.averaged.borrow() {
            return buffer.clone();
        }
        let (session, own) = (&self.job.session, self.layout.partition);
        let buffer =
            Tensor::of_category(session, "gradient_partition", Category::Gradient, [own], Dtype::Fp32);
        let pieces = self.pieces(|_| Some(buffer.clone()));
        let of_parameters = pieces.len();
        let padding = self.unused().map(|count| buffer.window(0, Dims::new(&[count])));
        let pieces = pieces.into_iter().chain(padding).collect();
        self.averaged.replace(Some(Averaged { pieces, of_parameters, buffer: Some(buffer.clone()) }));
        buffer
    }

    /// Views of the partition's part of each tensor that `of` answers with.
    fn pieces(&self, of: impl Fn(usize) -> Option<Tensor>) -> Vec<Tensor> {
        let piece = |index: &usize| Some(of(*index)?.window(0, Dims::new(&[self.layout.local(*index)])));
        self.layout.own().iter().filter_map(piece).collect()
    }

    /// Elements of the partition that no parameter has.
    fn unused(&self) -> Option<u64> {
        let used: u64 = self.layout.own().iter().map(|index| self.layout.local(*index)).sum();
        Some(self.layout.partition - used).filter(|unused| *unused > 0)
    }

    /// After the gradients of a micro-batch are reduced: those of the partition are kept.
    fn end_reduction(&self) {
        self.reduce();
        if self.job.options.overlaps() {
            self.clear_reduced();
        }
        let added = if self.job.offloads_optimizer { None } else { self.keep_gradients() };
        self.bucket.borrow_mut().release();
        if self.job.options.contiguous_gradients {
            self.in_partition.replace(None);
        }
        self.parameters.iter().for_each(|parameter| parameter.set_grad(None));
        // A name of its own has the last of them.
        let last = added.as_ref().and_then(|added| added.last().cloned());
        release!(added, last);
    }

    /// Keeps the gradients of the partition; answers with those that were added to kept ones.
    fn keep_gradients(&self) -> Option<List> {
        if self.sums_in_buffer() {
            if self.last.get() {
                release!(self.buffer());
            }
            return None;
        }
        let session = &self.job.session;
        let gradient = |index: &usize| {
            self.gradient(*index).unwrap_or_else(|| {
                let shape = self.parameters[*index].shape();
                Tensor::of_category(session, "gradient", Category::Gradient, shape, self.job.accumulated())
            })
        };
        let gradients: List = self.layout.own().iter().map(gradient).collect();
        let mut kept = self.kept.borrow_mut();
        let added = if kept.is_some() {
            Some(gradients)
        } else {
            *kept = Some(gradients);
            None
        };
        if !self.last.get() {
            return added;
        }
        let kept = kept.take()?;
        let part = |(index, gradient): (&usize, &Tensor)| {
            gradient.window(0, Dims::new(&[self.layout.local(*index)]))
        };
        let pieces: Vec<Tensor> = self.layout.own().iter().zip(kept.iter()).map(part).collect();
        let of_parameters = pieces.len();
        let padding = self.unused().map(|count| {
            Tensor::of_category(session, "padding", Category::Gradient, [count], self.job.accumulated())
        });
        let pieces = pieces.into_iter().chain(padding).collect();
        self.averaged.replace(Some(Averaged { pieces, of_parameters, buffer: None }));
        added
    }

    /// The partition's gradients as one tensor in fp32.
    fn flattened(&self, averaged: &Averaged) -> Tensor {
        if let Some(buffer) = &averaged.buffer {
            return buffer.clone();
        }
        let (session, own) = (&self.job.session, self.layout.partition);
        let make = |what, dtype| Tensor::of_category(session, what, Category::Gradient, [own], dtype);
        let flat = match &averaged.pieces[..] {
            [one] => one.clone(),
            _ => make("gradient_partition", self.job.accumulated()),
        };
        if flat.dtype() == Dtype::Fp32 { flat } else { make("gradient_partition", Dtype::Fp32) }
    }

    fn step_on_device(&self, norm: &Tensor) {
        let own = |index: &usize| self.layout.local(*index) > 0;
        let (ours, others): (Vec<usize>, Vec<usize>) = (0..self.parameters.len()).partition(own);
        others.into_iter().for_each(|index| self.clear_gradient(index));
        if let Some(averaged) = self.averaged.take() {
            let single = self.flattened(&averaged);
            ours.into_iter().for_each(|index| self.clear_gradient(index));
            release!(averaged);
            if self.job.clips {
                checks::unscale_and_clip(norm);
            }
            self.master.set_grad(Some(single));
        }
        self.optimizer.borrow_mut().step();
        self.master.set_grad(None);
    }
}

impl Strategy for Flat {
    fn begin_backward(&self, last: bool) {
        self.last.set(last);
    }

    fn end_backward(&self) {
        if self.job.options.stage == Stage::Two {
            self.end_reduction();
        } else if self.last.get() {
            if !self.job.options.overlaps() {
                (0..self.parameters.len()).for_each(|index| self.add_to_bucket(index));
            }
            self.end_reduction();
        }
    }

    fn step(&self) {
        let session = &self.job.session;
        let half = self.job.dtype != Dtype::Fp32;
        if self.job.offloads_optimizer {
            self.step_on_host(half);
        } else {
            let norm = {
                let averaged = self.averaged.borrow();
                let Some(averaged) = &*averaged else { return };
                if half {
                    checks::overflow(session, &averaged.pieces);
                }
                checks::global_norm(session, &averaged.pieces[..averaged.of_parameters])
            };
            checks::validate(&norm);
            let told = Tensor::of_category(session, "gradient_norm", Category::Temporary, [], Dtype::Fp32);
            self.step_on_device(&norm);
            release!(norm);
            // The engine keeps the last norm until it takes this one over.
            release!(self.global_norm.replace(Some(told)));
        }
        session.collective(Collective::AllGather, self.flat.nbytes());
    }
}
