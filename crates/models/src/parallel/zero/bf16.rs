//! Stage 1 of bf16 weights whose micro-batches are added up in fp32 (`bf16_optimizer.py`): every rank holds all of
//! the sums.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use engine::{Collective, Tensor, release};
use ledger::{Category, Dtype};

use super::layout::Layout;
use super::{Job, Strategy, checks};
use crate::optim::Optimizer;

/// The optimizer of bf16.
pub(super) struct Bf16 {
    job: Job,
    parameters: Vec<Tensor>,
    /// What the parameters are views of.
    flat: Tensor,
    /// This rank's partition in fp32.
    master: Tensor,
    /// The gradients of all parameters in fp32.
    sums: Tensor,
    optimizer: RefCell<Optimizer>,
    last: Cell<bool>,
    global_norm: RefCell<Option<Tensor>>,
}

impl Bf16 {
    /// Makes the flat buffer of `parameters`, this rank's partition and the sums of gradients in fp32.
    pub(super) fn wrap(job: Job, parameters: &[Tensor]) -> Rc<Self> {
        let numels: Vec<u64> = parameters.iter().map(Tensor::numel).collect();
        let layout = Layout::new(&numels, (job.rank, job.world), false);
        let flat = layout.flatten(&job, parameters, false);
        let make =
            |what, category, count, dtype| Tensor::of_category(&job.session, what, category, [count], dtype);
        let clone = make("zero.partition", Category::Temporary, layout.partition, job.dtype);
        let master = make("master", Category::MasterWeight, layout.partition, Dtype::Fp32);
        release!(clone);
        let sums = make("gradient_sums", Category::Gradient, layout.total(), Dtype::Fp32);
        let optimizer = Optimizer::new(job.form, std::slice::from_ref(&master));
        Rc::new(Self {
            parameters: parameters.to_vec(),
            flat,
            master,
            sums,
            optimizer: RefCell::new(optimizer),
            last: Cell::new(false),
            global_norm: RefCell::default(),
            job,
        })
    }
}

impl Strategy for Bf16 {
    fn begin_backward(&self, last: bool) {
        self.last.set(last);
    }

    fn scales_loss(&self) -> bool {
        false
    }

    fn end_backward(&self) {
        let session = &self.job.session;
        for gradient in self.parameters.iter().filter_map(Tensor::grad) {
            release!(gradient.copied(Dtype::Fp32));
        }
        if self.last.get() {
            let (count, category) = (self.sums.numel(), Category::CommunicationBuffer);
            let sent = Tensor::of_category(session, "sent_gradients", category, [count], self.job.dtype);
            session.collective(Collective::AllReduce, sent.nbytes());
            release!(sent);
        }
    }

    fn step(&self) {
        let norm = checks::norm_in_fp32(&self.job.session, &self.parameters);
        checks::validate(&norm);
        if self.job.clips {
            checks::clip_by(&norm);
        }
        self.master.set_grad(Some(self.sums.detach()));
        self.optimizer.borrow_mut().step();
        self.job.session.collective(Collective::AllGather, self.flat.nbytes());
        release!(self.global_norm.replace(Some(norm)));
        self.parameters.iter().for_each(|parameter| parameter.set_grad(None));
    }
}
