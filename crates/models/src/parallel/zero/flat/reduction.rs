//! The bucket in which gradients are brought together, and their reduction.

use engine::{Collective, Dims, Tensor, release};
use ledger::{Category, Dtype, Stream};

use super::super::{Stage, checks};
use super::Flat;

/// Where collectives run if they overlap.
const REDUCTION: Stream = Stream(1);

/// Gradients on their way to a reduction.
#[derive(Default)]
pub(super) struct Bucket {
    /// One buffer, or two in turn where reductions overlap; none where gradients are not copied.
    buffers: Vec<Tensor>,
    index: usize,
    elements: u64,
    /// The parameters whose gradients are in it.
    parameters: Vec<usize>,
    /// Those gradients, which live until it is cleared.
    gradients: Vec<Tensor>,
    /// The one gradient in it is too large to be copied.
    extra_large: bool,
    /// Whether buffers were made for this micro-batch.
    is_ready: bool,
    /// Parameters whose gradients may go once the next reduction is done.
    reduced: Vec<usize>,
}

impl Bucket {
    /// Lets go of the buffers, the last first.
    pub(super) fn release(&mut self) {
        while let Some(buffer) = self.buffers.pop() {
            drop(buffer);
        }
        self.is_ready = false;
    }

    fn clear(&mut self) {
        self.parameters.clear();
        while let Some(gradient) = self.gradients.pop() {
            drop(gradient);
        }
        self.elements = 0;
        self.extra_large = false;
    }
}

/// A slice of the bucket that one rank wants, and the elements of this rank's sums to which it is added.
#[derive(Clone, Copy)]
struct Slice {
    rank: u64,
    numel: u64,
    is_summed: bool,
}

impl Flat {
    /// Runs when backward has given the parameter `index` its gradient.
    pub(super) fn gradient_came(&self, index: usize) {
        self.make_buckets();
        if self.sums_by_parameter() {
            self.add_to_sum(index);
        }
        let (stage, overlaps) = (self.job.options.stage, self.job.options.overlaps());
        if stage == Stage::Two || (overlaps && self.last.get()) {
            self.add_to_bucket(index);
        }
    }

    fn make_buckets(&self) {
        let mut bucket = self.bucket.borrow_mut();
        if bucket.is_ready {
            return;
        }
        bucket.is_ready = true;
        let options = &self.job.options;
        if !(options.contiguous_gradients || self.job.offloads_optimizer) {
            return;
        }
        let dtype = if self.sums_by_parameter() { self.job.accumulated() } else { self.job.dtype };
        let category = Category::CommunicationBuffer;
        let make = || {
            Tensor::of_category(
                &self.job.session,
                "reduce_bucket",
                category,
                [options.reduce_bucket_size],
                dtype,
            )
        };
        bucket.release();
        bucket.is_ready = true;
        bucket.index = 0;
        bucket.buffers.push(make());
        if options.overlaps() {
            bucket.buffers.push(make());
        }
    }

    /// Adds the gradient of a parameter to its sum.
    fn add_to_sum(&self, index: usize) {
        let Some(gradient) = self.parameters[index].grad() else { return };
        let wide = gradient.companion(
            "sum",
            Category::Gradient,
            &self.parameters[index].shape(),
            self.job.accumulated(),
        );
        release!(gradient);
        let mut sums = self.sums.borrow_mut();
        if sums[index].is_none() {
            sums[index] = Some(wide);
        } else {
            release!(wide);
        }
        self.parameters[index].set_grad(None);
    }

    /// Whether gradients are copied into a buffer.
    fn copies(&self) -> bool {
        self.job.options.contiguous_gradients || self.job.offloads_optimizer
    }

    /// The gradient of a parameter joins the bucket, which is reduced first where it would be too full.
    pub(super) fn add_to_bucket(&self, index: usize) {
        let Some(gradient) = self.gradient(index) else { return };
        let options = &self.job.options;
        let numel = self.parameters[index].numel();
        if self.bucket.borrow().elements + numel > options.reduce_bucket_size {
            self.reduce();
            let mut bucket = self.bucket.borrow_mut();
            if self.copies() && options.overlaps() {
                bucket.index = 1 - bucket.index;
            }
        }
        let mut bucket = self.bucket.borrow_mut();
        if self.copies() {
            if numel > options.reduce_bucket_size {
                bucket.extra_large = true;
                if self.job.offloads_optimizer {
                    let (what, category) = ("extra_large", Category::Gradient);
                    let shape = gradient.shape();
                    gradient.move_into(&gradient.companion(what, category, &shape, gradient.dtype()));
                }
            } else if let Some(buffer) = bucket.buffers.get(bucket.index) {
                gradient.move_into(buffer);
            }
        }
        bucket.elements += numel;
        bucket.parameters.push(index);
        bucket.gradients.push(gradient);
    }

    /// Reduces what is in the bucket.
    pub(super) fn reduce(&self) {
        let stream = if self.job.options.overlaps() { REDUCTION } else { Stream(0) };
        let parameters = self.bucket.borrow().parameters.clone();
        if self.copies() {
            self.job.session.on_stream(stream, || self.average(&parameters));
        } else if !parameters.is_empty() {
            if self.job.options.overlaps() {
                self.clear_reduced();
            }
            self.job.session.on_stream(stream, || self.average_apart(&parameters));
        }
        self.job.session.on_stream(stream, || {
            parameters.iter().for_each(|index| self.after_reduction(*index));
        });
        self.bucket.borrow_mut().clear();
    }

    /// Lets go of gradients that were reduced before (`_clear_previous_reduced_grads`).
    pub(super) fn clear_reduced(&self) {
        let reduced = std::mem::take(&mut self.bucket.borrow_mut().reduced);
        reduced.into_iter().for_each(|index| self.clear_gradient(index));
    }

    /// Reduces gradients that lie in a row: each slice is wanted by the rank in whose partition it lies.
    fn average(&self, parameters: &[usize]) {
        let mut slices: Vec<Slice> = Vec::new();
        for index in parameters {
            for piece in self.layout.pieces(*index) {
                let is_summed = self.sums_in_buffer() && piece.rank == self.job.rank;
                if is_summed {
                    release!(self.buffer());
                }
                match slices.last_mut() {
                    Some(last) if !is_summed && last.rank == piece.rank => last.numel += piece.numel,
                    _ => slices.push(Slice { rank: piece.rank, numel: piece.numel, is_summed }),
                }
            }
        }
        let mut from = 0;
        let mut numel = 0;
        for to in 1..=slices.len() {
            numel += slices[to - 1].numel;
            if numel > self.job.options.reduce_bucket_size || to == slices.len() {
                self.all_reduce(&slices[from..to], numel);
                (from, numel) = (to, 0);
            }
        }
    }

    /// Sends `count` tensors of `numel` elements together; answers with what comes back, where that is memory of its own.
    fn send(&self, count: usize, numel: u64) -> Option<Tensor> {
        let session = &self.job.session;
        let own = if self.sums_by_parameter() { self.job.accumulated() } else { self.job.dtype };
        let category = Category::CommunicationBuffer;
        let make = |what, dtype| Tensor::of_category(session, what, category, [numel], dtype);
        let joined = (count > 1).then(|| make("joined_gradients", own));
        let sent = (own != self.job.dtype).then(|| make("sent_gradients", self.job.dtype));
        session.collective(Collective::AllReduce, numel * self.job.dtype.size());
        sent.or(joined)
    }

    /// Adds `numel` reduced elements to the sums of the partition.
    fn add(&self, numel: u64) {
        let (session, category) = (&self.job.session, Category::Temporary);
        release!(Tensor::of_category(session, "sum", category, [numel], Dtype::Fp32));
    }

    /// Reduces slices of the bucket, copied together where there are several.
    fn all_reduce(&self, slices: &[Slice], numel: u64) {
        let returned = self.send(slices.len(), numel);
        // What is sent as it is lies in the bucket.
        let is_own = |slice: &Slice| slice.rank == self.job.rank;
        if self.job.options.overlaps() && (returned.is_none() || slices.iter().any(is_own)) {
            let bucket = self.bucket.borrow();
            let memory =
                if bucket.extra_large { bucket.gradients.first() } else { bucket.buffers.get(bucket.index) };
            memory.into_iter().for_each(|memory| memory.record_stream(REDUCTION));
        }
        slices.iter().filter(|slice| slice.is_summed).for_each(|slice| self.add(slice.numel));
        release!(returned);
    }

    /// Reduces gradients that lie apart.
    fn average_apart(&self, parameters: &[usize]) {
        let numel: u64 = parameters.iter().map(|index| self.parameters[*index].numel()).sum();
        let returned = self.send(parameters.len(), numel);
        if self.job.options.overlaps() {
            self.bucket.borrow().gradients.iter().for_each(|gradient| gradient.record_stream(REDUCTION));
        }
        if self.sums_in_buffer() {
            for index in parameters.iter().filter(|index| self.layout.local(**index) > 0) {
                release!(self.buffer());
                self.add(self.layout.local(*index));
            }
        }
        release!(returned);
    }

    /// What becomes of a gradient that was reduced.
    fn after_reduction(&self, index: usize) {
        let options = &self.job.options;
        let is_own = self.layout.local(index) > 0;
        if is_own && self.copies() {
            self.copy_out(index);
        } else if !is_own && options.stage == Stage::Two {
            if options.overlaps() && !self.copies() {
                self.bucket.borrow_mut().reduced.push(index);
            } else {
                self.clear_gradient(index);
            }
        }
    }

    /// The gradient leaves the bucket, which will be written again.
    fn copy_out(&self, index: usize) {
        if self.job.offloads_optimizer {
            self.copy_to_host(index);
            return;
        }
        if self.sums_in_buffer() {
            if self.sums_by_parameter() {
                self.clear_gradient(index);
            }
            return;
        }
        let numels = || self.layout.own().into_iter().map(|own| self.parameters[own].numel()).sum::<u64>();
        let mut in_partition = self.in_partition.borrow_mut();
        let buffer = in_partition.get_or_insert_with(|| {
            Tensor::of_category(
                &self.job.session,
                "gradients_in_partition",
                Category::Gradient,
                [numels()],
                self.job.dtype,
            )
        });
        if let Some(gradient) = self.gradient(index) {
            gradient.move_into(buffer);
        }
    }

    /// The gradient goes to the host in fp32, its norm and whether it overflowed known.
    fn copy_to_host(&self, index: usize) {
        let session = &self.job.session;
        let count = self.layout.local(index);
        let whole = self.gradient(index);
        let Some(gradient) = &whole else { return };
        if self.sums_in_buffer() {
            if self.last.get() {
                let part = self.buffer().window(0, Dims::new(&[count]));
                self.offloaded.borrow_mut().push(checks::norm_of(&part));
                release!(checks::has_inf_or_nan(&part));
                session.add_traffic(count * Dtype::Fp32.size(), 0);
                release!(part, whole);
                self.clear_gradient(index);
            }
            return;
        }
        if self.job.accumulate > 1 && self.job.options.stage == Stage::Two {
            session.add_traffic(gradient.nbytes(), 0);
        }
        if !self.last.get() {
            return;
        }
        let part = gradient.window(0, Dims::new(&[count]));
        self.offloaded.borrow_mut().push(checks::norm_of(&part));
        release!(checks::has_inf_or_nan(gradient));
        release!(part.to(Dtype::Fp32));
        session.add_traffic(count * Dtype::Fp32.size(), 0);
        release!(part, whole);
        self.clear_gradient(index);
    }

    /// The update of an optimizer on the host.
    pub(super) fn step_on_host(&self, half: bool) {
        let session = &self.job.session;
        if half {
            checks::overflow_of_host(session);
        }
        let total = Tensor::of_category(session, "zero.scalar", Category::Temporary, [], Dtype::Fp32);
        session.collective(Collective::AllReduce, total.nbytes());
        release!(total);
        self.optimizer.borrow_mut().step();
        session.add_traffic(0, self.layout.partition * self.job.dtype.size());
        let averaged = self.averaged.take();
        release!(averaged);
        self.offloaded.take().into_iter().for_each(drop);
    }
}
