//! Gradients of stage 3 on their way to the partition.

use engine::{Collective, Tensor, release};
use ledger::{Category, Dtype};

use super::super::checks;
use super::optimizer::Gathered;
use super::{REDUCTION, list};
use crate::optim::List;

/// Gradients that wait for a reduction.
#[derive(Default)]
pub(super) struct Bucket {
    /// Where they are copied.
    pub(super) buffer: Option<Tensor>,
    elements: u64,
    params: Vec<usize>,
}

impl Gathered {
    /// Runs when backward has given the parameter `index` its gradient.
    pub(super) fn gradient_came(&self, index: usize) {
        let most = self.parts.job.options.reduce_bucket_size;
        let param = self.parts.param(index);
        let Some(gradient) = param.tensor.grad() else { return };
        let elements = self.bucket.borrow().elements;
        if elements > 0 && elements + param.numel > most {
            self.reduce();
        }
        let mut bucket = self.bucket.borrow_mut();
        if let Some(buffer) = &bucket.buffer
            && bucket.elements + param.numel <= most
        {
            if self.parts.job.options.overlaps() {
                gradient.record_stream(REDUCTION);
            }
            gradient.move_into(buffer);
        }
        bucket.params.push(index);
        bucket.elements += param.numel;
    }

    /// Reduces what waits, and adds it to the partition.
    pub(super) fn reduce(&self) {
        let mut indices = std::mem::take(&mut self.bucket.borrow_mut().params);
        if indices.is_empty() {
            return;
        }
        indices.sort_unstable();
        self.parts.on(REDUCTION, || self.reduce_scatter(&indices));
        self.bucket.borrow_mut().elements = 0;
    }

    fn reduce_scatter(&self, indices: &[usize]) {
        let (job, parts) = (&self.parts.job, &self.parts);
        let params: Vec<_> = indices.iter().map(|index| parts.param(*index)).collect();
        let padded: u64 = params.iter().map(|param| param.padded(job.world)).sum();
        let flat = match &params[..] {
            // A gradient that needs no padding is reduced where it is.
            [one] if one.numel.is_multiple_of(job.world) => one.tensor.grad(),
            _ => {
                let padding = |rank: u64| {
                    params.iter().map(move |param| {
                        let (start, end) = (rank * param.part_numel, (rank + 1) * param.part_numel);
                        end.min(param.numel).saturating_sub(start.min(param.numel))
                    })
                };
                let paddings: List = (0..job.world)
                    .flat_map(|rank| padding(rank).zip(&params).collect::<Vec<_>>())
                    .filter(|(chunk, param)| *chunk < param.part_numel)
                    .map(|(chunk, param)| parts.buffer("padding", param.part_numel - chunk, job.dtype))
                    .collect();
                let flat = parts.buffer("joined_gradients", padded, job.dtype);
                release!(paddings);
                Some(flat)
            }
        };
        parts.begin_collective();
        job.session.collective(Collective::ReduceScatter, padded * job.dtype.size());
        let accumulated = job.accumulated();
        let here = |param: &super::Param| {
            let start = job.rank * param.part_numel;
            param.numel.saturating_sub(start).min(param.part_numel)
        };
        let wide = (accumulated != job.dtype).then(|| {
            let cast = |param: &std::rc::Rc<super::Param>| parts.buffer("reduced", here(param), accumulated);
            params.iter().map(cast).collect::<List>()
        });
        let flat = if wide.is_some() {
            release!(flat);
            None
        } else {
            flat
        };
        // What the host has of a gradient is brought here, under names that live on until they are bound anew.
        let (mut held, mut added) = (None, None);
        for param in &params {
            if here(param) > 0 && job.offloads_optimizer {
                release!(held.take());
                let on_device = parts.buffer("reduced_on_device", here(param), job.accumulated());
                if self.accumulates.get() {
                    release!(added.replace(on_device.clone()));
                }
                self.offload(&on_device);
                held = Some(on_device);
            }
            if let Some(gradient) = param.tensor.grad().filter(|_| job.options.overlaps()) {
                gradient.record_stream(REDUCTION);
            }
            param.tensor.set_grad(None);
        }
        release!(held, added, wide, flat);
    }

    /// A reduced gradient goes to the host, where it is added to what is there.
    fn offload(&self, on_device: &Tensor) {
        let job = &self.parts.job;
        let (count, bytes) = (on_device.numel(), on_device.nbytes());
        job.session.add_traffic(bytes, bytes);
        if self.last.get() {
            let flat = Tensor::without_storage(&job.session, list(count), job.accumulated(), false);
            let norm = checks::norm_by_squares(&flat);
            self.norms.borrow_mut().push(norm);
            if job.accumulated() != Dtype::Fp32 {
                let (what, category) = ("offloaded", Category::Temporary);
                release!(Tensor::of_category(&job.session, what, category, [count], Dtype::Fp32));
            }
            job.session.add_traffic(count * Dtype::Fp32.size(), 0);
        }
    }
}
