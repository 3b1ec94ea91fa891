//! `torch.optim.Adafactor`: of a matrix the means of its rows and columns, of a vector all squares.

use engine::{Tensor, release};

use super::{Form, List, Slot, temporary};
use crate::setup::OptimizerImpl;

pub(super) fn step(form: Form, slots: &mut [Slot]) {
    for slot in slots.iter_mut().filter(|slot| slot.state.is_empty()) {
        if is_matrix(slot) {
            let dtype = slot.parameter.dtype();
            let (mut rows, mut columns) = (slot.parameter.shape(), slot.parameter.shape());
            let last = rows.len() - 1;
            (rows[last], columns[last - 1]) = (1, 1);
            slot.keep("row_var", &rows, dtype);
            slot.keep("col_var", &columns, dtype);
        } else {
            slot.keep_like("variance");
        }
    }
    if form.implementation == OptimizerImpl::Foreach { foreach(slots) } else { for_loop(slots) }
}

fn is_matrix(slot: &Slot) -> bool {
    slot.parameter.shape().len() > 1
}

/// The product of the factors, with what it is divided by.
fn estimate(slot: &Slot) -> Tensor {
    slot.state[0].mm(&slot.state[1])
}

/// The loop's names live until the next parameter binds them anew.
fn for_loop(slots: &[Slot]) {
    let (mut row_mean, mut column_mean, mut squared, mut update) = (None, None, None, None);
    for slot in slots {
        let Some(grad) = slot.parameter.grad() else { continue };
        release!(slot.parameter.norm_all());
        let estimate = if is_matrix(slot) {
            row_mean = Some(grad.norm_dim(-1));
            column_mean = Some(grad.norm_dim(-2));
            let estimate = estimate(slot);
            release!(slot.state[0].mean_dim(-2));
            estimate
        } else {
            squared = Some(temporary(&grad, "optimizer.grad_squared"));
            temporary(&grad, "optimizer.variance")
        };
        release!(update.insert(estimate).norm_all());
    }
    release!(row_mean, column_mean, squared, update);
}

/// Matrices are one group and vectors another, the one that comes first among the parameters first; the
/// updates of a group live until those of the next are there.
fn foreach(slots: &[Slot]) {
    let (mut matrices, mut vectors) = (Vec::new(), Vec::new());
    for slot in slots {
        let Some(grad) = slot.parameter.grad() else { continue };
        let group = if is_matrix(slot) { &mut matrices } else { &mut vectors };
        group.push((slot, grad));
    }
    let mut groups = [matrices, vectors];
    if slots.first().is_some_and(|slot| !is_matrix(slot)) {
        groups.reverse();
    }
    let mut updates = None;
    for group in groups.iter().filter(|group| !group.is_empty()) {
        for (slot, _) in group {
            release!(slot.parameter.norm_all());
        }
        let estimates: List = if is_matrix(group[0].0) {
            release!(group.iter().map(|(_, grad)| grad.norm_dim(-1)).collect::<List>());
            release!(group.iter().map(|(_, grad)| grad.norm_dim(-2)).collect::<List>());
            let estimates = group.iter().map(|(slot, _)| estimate(slot)).collect();
            release!(group.iter().map(|(slot, _)| slot.state[0].mean_dim(-2)).collect::<List>());
            estimates
        } else {
            let squares = group.iter().map(|(_, grad)| temporary(grad, "optimizer.grad_squared"));
            release!(squares.collect::<List>());
            group.iter().map(|(_, grad)| temporary(grad, "optimizer.variance")).collect()
        };
        updates = Some(estimates);
        for estimate in updates.iter().flat_map(|list: &List| &list.0) {
            release!(estimate.norm_all());
        }
    }
    release!(updates);
}
