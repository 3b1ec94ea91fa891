//! The vectors of the specification, by document and section.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use ledger::{
    Bytes, Category, CompareError, DeviceId, Entry, Found, Ledger, Measure, Named, Peak, ReconcileError,
    Reconciliation, Signal, StateError, StateProblem, States, compare, holders, reconcile, replay,
};

const GPU: DeviceId = DeviceId(0);

type Row = (&'static str, &'static str, f64, &'static str, &'static str, &'static str, bool);

/// The sample of document 3, step 4.
const SAMPLE: [Row; 7] = [
    ("parameters", "parameter", 800.0, "load", "zero_grad", "gpu", true),
    ("optimizer_state", "optimizer_state", 600.0, "load", "zero_grad", "gpu", true),
    ("activations", "activation", 300.0, "forward", "backward", "gpu", false),
    ("gradients", "gradient", 400.0, "backward", "update", "gpu", false),
    ("forward_workspace", "workspace", 200.0, "forward", "forward", "gpu", false),
    ("collective_buffer", "communication_buffer", 100.0, "backward", "backward", "gpu", false),
    ("offloaded_activation", "activation", 250.0, "forward", "backward", "cpu", false),
];

fn push(states: &mut States, row: Row) -> Result<(), StateError> {
    let (name, category, size_mib, start_phase, end_phase, device, persistent) = row;
    states.push(Entry { name, category, size_mib, start_phase, end_phase, device, persistent })
}

fn states(rows: &[Row]) -> States {
    let mut states = States::default();
    for row in rows {
        push(&mut states, *row).unwrap();
    }
    states
}

fn books(rows: &[Row]) -> Ledger {
    replay(&states(rows).tape().unwrap(), None)
}

fn problem(row: Row) -> StateProblem {
    match push(&mut States::default(), row) {
        Err(StateError::Bad { problem, .. }) => problem,
        other => panic!("{row:?} gave {other:?}"),
    }
}

/// The total of a phase on the GPU, in MiB.
fn total(books: &Ledger, phase: &str) -> f64 {
    let row = books.phases.iter().find(|row| row.device == GPU && row.at.phase == phase).unwrap();
    row.peak.allocated.unwrap().get() as f64 / 1_048_576.0
}

fn names(peak: &Peak) -> Vec<&str> {
    peak.contributors.iter().map(|row| row.name.as_str()).collect()
}

#[test]
fn unified_ledger_step_4_lifecycle_contract() {
    let (name, category, size, start, end, device, persistent) = SAMPLE[0];
    assert_eq!(
        problem((name, category, -1.0, start, end, device, persistent)),
        StateProblem::Negative { size: -1.0 }
    );
    assert!(matches!(
        problem((name, "unknown", size, start, end, device, persistent)),
        StateProblem::Category { .. }
    ));
    assert!(matches!(
        problem((name, category, size, start, end, "tpu", persistent)),
        StateProblem::Device { .. }
    ));
    let reversed = problem((name, category, size, "backward", "forward", device, persistent));
    assert!(matches!(reversed, StateProblem::Reversed { .. }));
}

#[test]
fn unified_ledger_step_4_phase_residency() {
    let books = books(&SAMPLE);
    assert_eq!(total(&books, "load"), 1400.0);
    assert_eq!(total(&books, "forward"), 1900.0);
    assert_eq!(total(&books, "loss"), 1700.0);
    assert_eq!(total(&books, "backward"), 2200.0);
    assert_eq!(total(&books, "update"), 1800.0);
    assert_eq!(total(&books, "zero_grad"), 1400.0);
    // The state on the host has its books, apart from the GPU's.
    let host =
        books.phases.iter().find(|row| row.device == DeviceId(1) && row.at.phase == "forward").unwrap();
    assert_eq!(host.peak.allocated, Some(Bytes::mib(250)));
}

#[test]
fn unified_ledger_step_4_active_states() {
    let tape = states(&SAMPLE).tape().unwrap();
    // The objects of a phase are all there when its last object is made.
    let last = |phase| {
        let mut current = "";
        let mut last = 0;
        for (index, event) in tape.events().enumerate() {
            match event {
                ledger::Event::Mark(mark) => current = tape.phase_name(tape.mark_of(mark).phase),
                ledger::Event::Alloc { .. } if current == phase => last = index,
                _ => {}
            }
        }
        let rows = holders(&tape, last, GPU);
        rows.into_iter().map(|row| row.name).collect::<Vec<_>>()
    };
    assert_eq!(
        last("backward"),
        ["parameters", "optimizer_state", "gradients", "activations", "collective_buffer"]
    );
    assert_eq!(last("forward"), ["parameters", "optimizer_state", "activations", "forward_workspace"]);
}

#[test]
fn unified_ledger_step_4_peak_overlap() {
    let books = books(&SAMPLE);
    let peak = books.peaks.allocated.unwrap();
    assert_eq!(peak.at.as_ref().unwrap().phase, "backward");
    assert_eq!(peak.bytes, Bytes::mib(2200));
    assert_eq!(
        names(&peak),
        ["parameters", "optimizer_state", "gradients", "activations", "collective_buffer"]
    );
    assert_eq!(books.peaks.requested, None);
    assert_eq!(books.peaks.reserved, None);
}

#[test]
fn unified_ledger_step_4_ties_go_to_the_earliest_phase_and_then_the_name() {
    let books = books(&[
        ("b", "parameter", 10.0, "load", "zero_grad", "gpu", true),
        ("a", "parameter", 10.0, "forward", "forward", "gpu", false),
        ("c", "activation", 10.0, "backward", "backward", "gpu", false),
    ]);
    let peak = books.peaks.allocated.unwrap();
    assert_eq!(peak.at.as_ref().unwrap().phase, "forward");
    assert_eq!(names(&peak), ["a", "b"]);
}

#[test]
fn unified_ledger_step_4_candidate_peaks() {
    let baseline = books(&SAMPLE);
    let mut checkpoint = SAMPLE;
    checkpoint[2].4 = "forward";
    let mut offload = SAMPLE;
    offload[2].5 = "cpu";
    let (checkpoint, offload) = (books(&checkpoint), books(&offload));
    let report = compare(
        Named { name: "baseline", peaks: &baseline.peaks },
        &[
            Named { name: "checkpoint", peaks: &checkpoint.peaks },
            Named { name: "offload", peaks: &offload.peaks },
        ],
    )
    .unwrap();
    assert_eq!(report.measure, Measure::Allocated);
    assert_eq!(report.peak.bytes, Bytes::mib(2200));
    let row = |index: usize| {
        let candidate = &report.candidates[index];
        let phase = candidate.peak.at.as_ref().unwrap().phase.as_str();
        (candidate.name.as_str(), phase, candidate.peak.bytes, candidate.saving.get())
    };
    assert_eq!(row(0), ("checkpoint", "forward", Bytes::mib(1900), 300 << 20));
    assert_eq!(row(1), ("offload", "backward", Bytes::mib(1900), 300 << 20));
    // Offload takes the activations away and leaves the rest as it was.
    let offload = &report.candidates[1];
    assert_eq!(offload.saving_by_category[&Category::Activation].get(), 300 << 20);
    assert_eq!(
        offload.unchanged,
        [Category::Parameter, Category::Gradient, Category::OptimizerState, Category::CommunicationBuffer]
    );
}

#[test]
fn unified_ledger_step_4_empty_candidates_and_names_are_refused() {
    let books = books(&SAMPLE);
    let named = |name| Named { name, peaks: &books.peaks };
    assert_eq!(compare(named("base"), &[]), Err(CompareError::NoCandidates { baseline: "base".into() }));
    assert_eq!(compare(named("base"), &[named("")]), Err(CompareError::EmptyName { index: 1 }));
    assert_eq!(
        compare(named("base"), &[named("a"), named("a")]),
        Err(CompareError::DoubledName { name: "a".into() })
    );
}

#[test]
fn unified_ledger_framework_check_a_host_state_leaves_the_gpu_ledger_at_zero() {
    let books = books(&[("profiled_cpu_tensor", "activation", 0.0625, "forward", "backward", "cpu", false)]);
    assert!(
        books
            .phases
            .iter()
            .filter(|row| row.device == GPU)
            .all(|row| row.peak.allocated == Some(Bytes::ZERO))
    );
    let peak = books.peaks.allocated.unwrap();
    assert_eq!((peak.bytes, peak.at.unwrap().phase.as_str()), (Bytes::ZERO, "load"));
    assert!(peak.contributors.is_empty());
}

/// Document 2, Q1: Linear(512, 1024), ReLU, Linear(1024, 512), batch 16, sequence 64.
fn tiny_ledger_net() -> Ledger {
    let parameters = 512 * 1024 + 1024 + 1024 * 512 + 512;
    let activation = 16 * 64 * 512 * 4;
    let mib = |bytes: u64| bytes as f64 / 1_048_576.0;
    let phases = ["after_load", "forward_peak", "backward_peak", "after_update"];
    let mut states = States::with_phases(phases.map(String::from).to_vec()).unwrap();
    for row in [
        ("parameters", "parameter", mib(parameters * 4), "after_load", "after_update", "gpu", true),
        ("gradients", "gradient", mib(parameters * 4), "backward_peak", "after_update", "gpu", false),
        (
            "optimizer_state",
            "optimizer_state",
            mib(parameters * 8),
            "forward_peak",
            "after_update",
            "gpu",
            true,
        ),
        ("saved_activations", "activation", mib(activation), "forward_peak", "backward_peak", "gpu", false),
        ("temporary", "workspace", mib(activation / 2), "forward_peak", "backward_peak", "gpu", false),
    ] {
        push(&mut states, row).unwrap();
    }
    replay(&states.tape().unwrap(), None)
}

#[test]
fn memory_profiling_q1_objects_count_only_in_their_phases() {
    let books = tiny_ledger_net();
    let totals: Vec<(&str, u64)> =
        books.phases.iter().map(|row| (row.at.phase.as_str(), row.peak.allocated.unwrap().get())).collect();
    assert_eq!(
        totals,
        [
            ("after_load", 4_200_448),
            ("forward_peak", 15_747_072),
            ("backward_peak", 19_947_520),
            ("after_update", 16_801_792),
        ]
    );
}

#[test]
fn memory_profiling_q2_the_peak_is_an_overlap() {
    let books = tiny_ledger_net();
    let peak = books.peaks.allocated.as_ref().unwrap();
    assert_eq!(peak.at.as_ref().unwrap().phase, "backward_peak");
    assert_eq!(peak.bytes.get(), 19_947_520);
    // The overlap bound: the largest phase total, and the sum of what is there.
    let bound = books.phases.iter().map(|row| row.peak.allocated.unwrap()).max().unwrap();
    assert_eq!(peak.bytes, bound);
    assert_eq!(peak.bytes, peak.contributors.iter().map(|row| row.bytes).sum());
    assert_eq!(names(peak), ["optimizer_state", "gradients", "parameters", "saved_activations", "temporary"]);
}

fn reconciled(books: &Ledger, allocated: u64, reserved: u64, capacity: u64) -> Reconciliation {
    let found = Found {
        allocated: Bytes::new(allocated),
        reserved: Bytes::new(reserved),
        capacity: Bytes::new(capacity),
    };
    reconcile(&books.prediction(None).unwrap(), found, None).unwrap()
}

#[test]
fn memory_profiling_q6_three_signals_at_once() {
    const MIB: u64 = 1 << 20;
    let books = tiny_ledger_net();
    let allocated = 19_947_520 + 3 * MIB;
    let record = reconciled(&books, allocated, allocated + 7 * MIB, allocated + 8 * MIB);
    assert_eq!(record.estimate_difference.get(), 3 << 20);
    assert_eq!(record.allocator_gap.get(), 7 << 20);
    assert_eq!(record.budget_margin.get(), 1 << 20);
    assert_eq!(record.signals, Signal::ALL);
    assert_eq!(record.at.unwrap().phase, "backward_peak");
    assert_eq!(record.dominant_object.as_deref(), Some("optimizer_state"));
    // Nothing of the difference is explained: it stays open in a line of its own.
    assert_eq!(record.rows.iter().filter_map(|row| row.predicted).sum::<Bytes>().get(), 19_947_520);
    let open = record.rows.last().unwrap();
    assert_eq!((open.category, open.difference.unwrap().get()), (Category::Unattributed, 3 << 20));
}

/// A ledger of one object of `bytes`.
fn single(bytes: u64) -> Ledger {
    let size = bytes as f64 / 1_048_576.0;
    books(&[("object", "parameter", size, "load", "zero_grad", "gpu", true)])
}

#[test]
fn memory_profiling_q6_below_the_estimate_the_difference_is_negative() {
    let record = reconciled(&single(20), 18, 19, 30);
    assert_eq!(record.estimate_difference.get(), -2);
    assert_eq!(record.signals, []);
    // Far below is no signal either: an estimate may be an upper bound.
    assert_eq!(reconciled(&single(2000), 18, 19, 30).signals, []);
}

#[test]
fn memory_profiling_q6_invalid_snapshots_are_refused() {
    let books = single(20);
    let refused = |allocated, reserved, capacity| {
        let found = Found {
            allocated: Bytes::new(allocated),
            reserved: Bytes::new(reserved),
            capacity: Bytes::new(capacity),
        };
        reconcile(&books.prediction(None).unwrap(), found, None).unwrap_err()
    };
    assert!(matches!(refused(22, 21, 30), ReconcileError::AllocatedBeyondReserved { .. }));
    assert!(matches!(refused(22, 31, 30), ReconcileError::ReservedBeyondCapacity { .. }));
    assert_eq!(refused(0, 0, 0), ReconcileError::NoCapacity);
    assert!(matches!(refused(20, 20, u64::MAX), ReconcileError::TooLarge { .. }));
}

#[test]
fn memory_profiling_q6_ten_percent_is_strict() {
    let books = single(100);
    // Exactly a tenth above, a tenth retained, a tenth left: no signal.
    assert_eq!(reconciled(&books, 110, 210, 1000).signals, []);
    assert_eq!(reconciled(&books, 110, 900, 1000).signals, [Signal::InspectAllocatorRetainedSpace]);
    assert_eq!(reconciled(&books, 111, 111, 1000).signals, [Signal::InspectEstimateDifference]);
    assert_eq!(reconciled(&books, 100, 201, 1000).signals, [Signal::InspectAllocatorRetainedSpace]);
    assert_eq!(reconciled(&books, 90, 91, 101).signals, [Signal::CapacityPressure]);
}

#[test]
fn a_prediction_at_a_phase_is_that_phase() {
    let books = books(&SAMPLE);
    let update = books.prediction(Some("update")).unwrap();
    assert_eq!((update.bytes, update.contributors.len()), (Bytes::mib(1800), 0));
    assert_eq!(books.prediction(Some("backward")).unwrap().contributors.len(), 5);
    let unknown = books.prediction(Some("warmup")).unwrap_err();
    assert_eq!(
        unknown.to_string(),
        "the ledger has no phase `warmup`; it has load, forward, loss, backward, update, zero_grad"
    );
}

#[test]
fn states_have_sizes_that_are_amounts() {
    let with_size = |size| {
        let (name, category, _, start, end, device, persistent) = SAMPLE[0];
        (name, category, size, start, end, device, persistent)
    };
    assert!(matches!(problem(with_size(f64::NAN)), StateProblem::NotFinite { .. }));
    assert!(matches!(problem(with_size(f64::INFINITY)), StateProblem::NotFinite { .. }));
    let too_large = (1_u64 << 33) as f64;
    assert_eq!(problem(with_size(too_large)), StateProblem::TooLarge { size: too_large });
    assert!(push(&mut States::default(), with_size(too_large - 1.0)).is_ok());
    // Rounded to the nearest byte.
    let books = books(&[with_size(1.6 / 1_048_576.0)]);
    assert_eq!(books.peaks.allocated.unwrap().bytes, Bytes::new(2));
}

#[test]
fn states_of_no_bytes_are_kept() {
    let (zero, load) = (("zero", "workspace", 0.0), "load");
    let all_zero = [
        (zero.0, zero.1, zero.2, load, load, "gpu", false),
        ("nothing", "parameter", 0.0, load, "zero_grad", "gpu", true),
    ];
    let peak = books(&all_zero).peaks.allocated.unwrap();
    assert_eq!((peak.bytes, names(&peak)), (Bytes::ZERO, vec!["nothing", "zero"]));
    let mut rows = SAMPLE.to_vec();
    rows.push(("zero", "workspace", 0.0, "backward", "backward", "gpu", false));
    let peak = books(&rows).peaks.allocated.unwrap();
    assert_eq!(peak.bytes, Bytes::mib(2200));
    assert_eq!(names(&peak).last(), Some(&"zero"));
}

#[test]
fn states_need_names_of_their_own() {
    let mut states = states(&SAMPLE);
    let doubled = push(&mut states, SAMPLE[2]).unwrap_err();
    assert_eq!(
        doubled.to_string(),
        "state 7: `activations` is the name of an earlier state; every state needs its own"
    );
    let (_, category, size, start, end, device, persistent) = SAMPLE[0];
    let empty = push(&mut states, ("", category, size, start, end, device, persistent)).unwrap_err();
    assert_eq!(empty, StateError::EmptyName { index: 7 });
    assert_eq!(States::default().tape().unwrap_err(), StateError::Empty);
    assert_eq!(States::with_phases(vec![]).unwrap_err(), StateError::NoPhases);
    assert_eq!(States::with_phases(vec![String::new()]).unwrap_err(), StateError::EmptyPhase { index: 0 });
    let doubled = States::with_phases(vec!["a".into(), "a".into()]).unwrap_err();
    assert_eq!(doubled, StateError::DoubledPhase { name: "a".into() });
}

#[test]
fn persistence_does_not_alter_totals() {
    let mut flipped = SAMPLE;
    for row in &mut flipped {
        row.6 = !row.6;
    }
    assert_eq!(books(&SAMPLE), books(&flipped));
}

#[test]
fn states_that_reach_2_to_the_63_together_are_refused() {
    let names: Vec<String> = (0..1025).map(|index| index.to_string()).collect();
    let mut states = States::default();
    for name in &names {
        let size_mib = ((1_u64 << 33) - 1) as f64;
        let entry = Entry {
            name,
            category: "parameter",
            size_mib,
            start_phase: "load",
            end_phase: "load",
            device: "gpu",
            persistent: true,
        };
        states.push(entry).unwrap();
    }
    assert!(matches!(states.tape(), Err(StateError::TooLarge(_))));
}
