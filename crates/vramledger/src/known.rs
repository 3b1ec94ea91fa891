//! Objects that are known besides a message: of a plan, of a tape or ledger, or of a number of parameters.

use std::collections::BTreeMap;

use ledger::{Category, DeviceKind, Event, Tape};
use models::OptimizerImpl;
use wire::{Document, Ledger};

use crate::evidence::read_ledger;
use crate::{Error, PlanQuestion};

/// What is known of the run that a message is of.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// The parameters of the model, all of them.
    pub parameters: Option<u64>,
    /// The ranks that hold the model.
    pub ranks: u64,
    /// Whether, where no stack decides, that object is taken before which the run is nearest to the message.
    pub(crate) takes_nearest: bool,
    run: Run,
    /// The same run with the optimizer parameter by parameter, where nothing says how it steps.
    one_by_one: Option<Run>,
}

/// The objects of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Run {
    pub(crate) objects: Vec<KnownObject>,
    pub(crate) tape: Option<Tape>,
}

/// Objects of one name, purpose and size.
#[derive(Clone, Debug)]
pub(crate) struct KnownObject {
    pub(crate) name: String,
    pub(crate) category: Option<Category>,
    pub(crate) bytes: u64,
    pub(crate) count: Option<u64>,
    pub(crate) dtype: Option<String>,
    pub(crate) shape: Option<Vec<u64>>,
    pub(crate) phase: Option<String>,
    /// The events of the tape that make the first of each step.
    pub(crate) events: Vec<usize>,
}

impl Known {
    /// What a model of `parameters` on each of `ranks` ranks tells.
    pub fn of_parameters(parameters: u64, ranks: u64) -> Self {
        Self { parameters: Some(parameters), ranks, ..Self::default() }
    }

    /// What the plan of `question` tells.
    ///
    /// # Errors
    /// Where the question cannot be answered.
    pub fn of_plan(question: PlanQuestion<'_>) -> Result<Self, Error> {
        let ranks = u64::from(question.setup.world_size);
        let one_by_one = question.setup.optimizer_impl.is_none().then(|| {
            let mut question = question.clone();
            question.setup.optimizer_impl = Some(OptimizerImpl::ForLoop);
            question
        });
        let plan = crate::plan(question)?;
        let parameters = plan.ledger.parameters.map(|parameters| parameters.total);
        // Not every optimizer has that form.
        let one_by_one =
            one_by_one.filter(|question| question.model.model.contradiction(&question.setup).is_none());
        let one_by_one = one_by_one.and_then(|question| crate::plan(question).ok());
        let one_by_one = one_by_one.map(|plan| Run::of_tape(plan.tape));
        Ok(Self { parameters, ranks, run: Run::of_tape(plan.tape), one_by_one, ..Self::default() })
    }

    /// The run, as far as known with the optimizer parameter by parameter where `one_by_one` is so.
    pub(crate) fn run(&self, one_by_one: bool) -> &Run {
        self.one_by_one.as_ref().filter(|_| one_by_one).unwrap_or(&self.run)
    }

    /// What the tape or ledger in `bytes` tells; `name` is what to call it where it is none.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn of_file(name: &str, bytes: &[u8]) -> Result<Self, Error> {
        if let Ok(Document::Tape(read)) = Document::read(bytes) {
            let (about, tape) = *read;
            let parameters = about.parameters.map(|parameters| parameters.total);
            let ranks = about.batch.map_or(1, |batch| batch.world_size);
            return Ok(Self { parameters, ranks, run: Run::of_tape(tape), ..Self::default() });
        }
        Ok(Self::of_ledger(&read_ledger(name, bytes)?))
    }

    /// What `ledger` tells: the objects at its peaks.
    pub(crate) fn of_ledger(ledger: &Ledger) -> Self {
        let peaks = [&ledger.peaks.requested, &ledger.peaks.allocated, &ledger.peaks.reserved];
        let mut objects: BTreeMap<(String, Category, u64), KnownObject> = BTreeMap::new();
        for peak in peaks.into_iter().flatten() {
            for row in peak.contributors.iter().filter(|row| row.count > 0) {
                // Objects of one name may differ in size: what is told then is their mean, and no size.
                let Some(0) = row.bytes.checked_rem(row.count) else { continue };
                let bytes = row.bytes / row.count;
                objects.entry((row.name.clone(), row.category.0, bytes)).or_insert(KnownObject {
                    name: row.name.clone(),
                    category: Some(row.category.0),
                    bytes,
                    count: Some(row.count),
                    dtype: None,
                    shape: None,
                    phase: None,
                    events: Vec::new(),
                });
            }
        }
        Self {
            parameters: ledger.parameters.map(|parameters| parameters.total),
            ranks: ledger.batch.map_or(1, |batch| batch.world_size),
            run: Run { objects: objects.into_values().collect(), tape: None },
            ..Self::default()
        }
    }

    /// Objects whose size is a multiple of the number of parameters, of all or of those of one rank.
    pub(crate) fn multiples(&self) -> Vec<KnownObject> {
        let Some(parameters) = self.parameters else { return Vec::new() };
        let shares = [1, self.ranks.max(1)];
        let shares = &shares[..if self.ranks > 1 { 2 } else { 1 }];
        let sized = |ranks: u64, each: u64| {
            let of = if ranks == 1 {
                format!("all {parameters} parameters")
            } else {
                format!("one rank's share of {parameters} parameters among {ranks}")
            };
            Some(KnownObject {
                name: format!("{each} bytes for each of {of}"),
                category: None,
                bytes: parameters.div_ceil(ranks).checked_mul(each)?,
                count: None,
                dtype: None,
                shape: None,
                phase: None,
                events: Vec::new(),
            })
        };
        let each = shares.iter().flat_map(|ranks| ELEMENTS.map(|each| (*ranks, each)));
        each.filter_map(|(ranks, each)| sized(ranks, each)).collect()
    }
}

impl Run {
    fn of_tape(tape: Tape) -> Self {
        Self { objects: of_tape(&tape), tape: Some(tape) }
    }
}

/// The bytes of an element that weights, gradients and states have.
const ELEMENTS: [u64; 4] = [1, 2, 4, 8];

/// Objects of one name, purpose and size, and how many of them each step makes.
type Made = (KnownObject, BTreeMap<u32, u64>);

/// The objects of `tape`, those of one name, purpose and size together.
fn of_tape(tape: &Tape) -> Vec<KnownObject> {
    let mut rows: BTreeMap<(usize, Category, u64), Made> = BTreeMap::new();
    let mut at = None;
    for (index, event) in tape.events().enumerate() {
        match event {
            Event::Mark(mark) => at = Some(tape.mark_of(mark)),
            Event::Alloc { object, bytes, device, .. }
                if tape.devices[usize::from(device.0)].kind == DeviceKind::Gpu =>
            {
                let known = tape.object(object);
                let label = tape.label(known.label);
                let layout = known.layout.map(|layout| tape.layout(layout));
                let key = (label.name.index(), label.category, bytes.get());
                let row = rows.entry(key).or_insert_with(|| {
                    let object = KnownObject {
                        name: tape.name(label.name).to_owned(),
                        category: Some(label.category),
                        bytes: bytes.get(),
                        count: None,
                        dtype: layout.map(|layout| layout.dtype.as_str().to_owned()),
                        shape: layout.map(|layout| layout.shape.to_vec()),
                        phase: at.map(|at| tape.phase_name(at.phase).to_owned()),
                        events: Vec::new(),
                    };
                    (object, BTreeMap::new())
                });
                let of_step = row.1.entry(at.map_or(0, |at| at.step)).or_default();
                if *of_step == 0 {
                    row.0.events.push(index);
                }
                *of_step += 1;
            }
            _ => {}
        }
    }
    let of_a_step = |(object, steps): Made| KnownObject { count: steps.into_values().max(), ..object };
    rows.into_values().map(of_a_step).collect()
}
