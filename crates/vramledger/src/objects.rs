//! The objects of a tape at the end of a phase, one by one.

use ledger::{Bytes, DeviceId, Event, Label, LabelId, LayoutId, Tape};

use crate::Error;

/// An object that is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alive {
    /// What it is.
    pub label: Label,
    /// Its dtype and shape, where the tape has them.
    pub layout: Option<LayoutId>,
    /// Its size in the tape's unit.
    pub bytes: Bytes,
    /// Where it is.
    pub device: DeviceId,
}

/// The objects that the program holds at the end of a phase, in the order in which they were made. Without a
/// micro-batch, the last one of the step that has the phase.
///
/// # Errors
/// No such step, micro-batch or phase on the tape.
pub fn objects(tape: &Tape, step: u32, micro_batch: Option<u32>, phase: &str) -> Result<Vec<Alive>, Error> {
    let end = end_of(tape, step, micro_batch, phase).ok_or_else(|| {
        let batch = micro_batch.map(|number| format!(", micro-batch {number}")).unwrap_or_default();
        Error::Setup {
            what: format!("the tape has no phase `{}` in step {step}{batch}", ledger::clip(phase)),
        }
    })?;
    let mut held: Vec<Option<(LabelId, Bytes, DeviceId)>> = vec![None; tape.objects().len()];
    for event in (0..end).map(|index| tape.event(index)) {
        match event {
            Event::Alloc { object, bytes, device, .. } => {
                held[object.0 as usize] = Some((tape.object(object).label, bytes, device));
            }
            Event::FreeRequested(object) | Event::Free(object) => held[object.0 as usize] = None,
            Event::Relabel(object, label) => {
                if let Some(it) = &mut held[object.0 as usize] {
                    it.0 = label;
                }
            }
            _ => {}
        }
    }
    let alive = held.into_iter().zip(tape.objects()).filter_map(|(held, object)| {
        let (label, bytes, device) = held?;
        Some(Alive { label: tape.label(label), layout: object.layout, bytes, device })
    });
    Ok(alive.collect())
}

/// The event at which the last stretch of that phase is over.
fn end_of(tape: &Tape, step: u32, micro_batch: Option<u32>, phase: &str) -> Option<usize> {
    let (mut inside, mut end) = (false, None);
    for (index, event) in tape.events().enumerate() {
        let Event::Mark(mark) = event else { continue };
        let mark = tape.mark_of(mark);
        let wanted = mark.step == step
            && (micro_batch.is_none() || mark.micro_batch == micro_batch)
            && tape.phase_name(mark.phase) == phase;
        if inside && !wanted {
            end = Some(index);
        }
        inside = wanted;
    }
    if inside { Some(tape.len()) } else { end }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CONTEXT, PlanQuestion, find_gpu, load_model, plan};

    #[test]
    fn an_mlp_keeps_its_input_and_a_result_a_layer() {
        let model = load_model("mlp:4x512").unwrap();
        let question = PlanQuestion {
            model: &model,
            setup: models::Setup { batch: 32, ..models::Setup::default() },
            gpu: find_gpu("H100-80GB").unwrap().clone(),
            context: CONTEXT,
            alloc_conf: String::new(),
        };
        let plan = plan(question).unwrap();
        let alive = objects(&plan.tape, 1, None, "forward").unwrap();
        let kept: Vec<_> = alive.iter().filter(|it| it.label.saved).collect();
        assert!(kept.iter().all(|it| it.bytes == Bytes::new(32 * 512 * 4)), "{kept:?}");
        let of = |category| kept.iter().filter(|it| it.label.category == category).count();
        assert_eq!((of(ledger::Category::Input), of(ledger::Category::Activation)), (1, 4));
        let error = objects(&plan.tape, 9, None, "forward").unwrap_err();
        assert_eq!(error.to_string(), "the tape has no phase `forward` in step 9");
    }
}
