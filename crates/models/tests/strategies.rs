//! What strategies change and what they leave alone, in the words of the specification.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::collections::{BTreeMap, BTreeSet};

use ledger::{Category, DeviceId, Dtype, Event, Ledger, Phase, Tape};
use models::{GPUS, Model, Offload, Optimizer, OptimizerImpl, Run, Setup};

const GPU: DeviceId = DeviceId(0);
const HOST: DeviceId = DeviceId(1);

fn llama() -> Model {
    let config = r#"{"model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 512, "torch_dtype": "float32"}"#;
    Model::from_config(config).unwrap()
}

fn setup() -> Setup {
    Setup { batch: 8, seqs: vec![64], steps: 2, ..Setup::default() }
}

fn run(setup: &Setup) -> (Run, Ledger) {
    let run = llama().train(setup, &GPUS[0]).unwrap();
    let books = ledger::replay(&run.tape, None);
    (run, books)
}

fn checkpointed(form: &str) -> Setup {
    Setup { checkpoint: form.parse().unwrap(), ..setup() }
}

/// The requested bytes of `category` on the GPU when the first phase of that name ends.
fn at_end(books: &Ledger, phase: &str, category: Category) -> u64 {
    let row = books.phases.iter().find(|row| row.device == GPU && row.at.step == 1 && row.at.phase == phase);
    row.unwrap().end_by_category.get(&category).map_or(0, |bytes| bytes.get())
}

/// The largest requested total of the phases of that name on the GPU.
fn peak_of(books: &Ledger, phase: &str) -> u64 {
    let rows = books.phases.iter().filter(|row| row.device == GPU && row.at.phase == phase);
    rows.filter_map(|row| row.peak.requested).max().unwrap().get()
}

fn peak(books: &Ledger) -> u64 {
    books.peaks.requested.as_ref().unwrap().bytes.get()
}

/// The bytes of each allocation on the GPU, by category, in order.
fn sizes(tape: &Tape, category: Category) -> Vec<u64> {
    let of = |event| match event {
        Event::Alloc { object, bytes, device: GPU, .. } => {
            (tape.label(tape.object(object).label).category == category).then_some(bytes.get())
        }
        _ => None,
    };
    tape.events().filter_map(of).collect()
}

#[test]
fn accumulation_lowers_activations_and_no_state() {
    let (_, whole) = run(&setup());
    let (_, parts) = run(&Setup { batch: 2, accumulate: 4, ..setup() });
    let saved = |books: &Ledger| at_end(books, "forward", Category::Activation);
    assert!(saved(&parts) < saved(&whole) / 3, "{} of {}", saved(&parts), saved(&whole));
    for category in [Category::Parameter, Category::Buffer, Category::Gradient, Category::OptimizerState] {
        let after = |books| at_end(books, "backward", category) + at_end(books, "update", category);
        assert_eq!(after(&parts), after(&whole), "{category}");
    }
}

#[test]
fn checkpointing_shortens_lifetimes_and_adds_one_forward() {
    let (plain, plain_books) = run(&setup());
    for form in ["full", "segments:2x2", "every:1", "layers:0,1,2,3"] {
        let (shorter, books) = run(&checkpointed(form));
        assert!(lifetime(&shorter.tape) < lifetime(&plain.tape), "{form}");
        let saved = |books| at_end(books, "forward", Category::Activation);
        assert!(saved(&books) < saved(&plain_books) / 2, "{form}");
        // A layer is run again up to what backward wants of it: not its last product.
        let work = shorter.flops;
        assert_eq!((work.forward, work.backward), (plain.flops.forward, plain.flops.backward), "{form}");
        let in_layers = work.recompute as f64 / work.forward as f64;
        assert!((0.7..1.0).contains(&in_layers), "{form} runs {in_layers} forwards again");
    }
    let (reentrant, _) = run(&Setup { checkpoint_reentrant: true, ..checkpointed("full") });
    let (early, _) = run(&checkpointed("full"));
    assert!(reentrant.flops.recompute > early.flops.recompute, "a reentrant checkpoint runs to its end");
    let (selective, _) = run(&checkpointed("selective:mm,_scaled_dot_product_efficient_attention"));
    assert_eq!(selective.flops.recompute, 0, "kept products are not run again");
}

/// Bytes times events that the activations made in the first forward pass live.
fn lifetime(tape: &Tape) -> u128 {
    let (mut born, mut sum, mut phase) = (BTreeMap::new(), 0, None);
    for (index, event) in tape.events().enumerate() {
        match event {
            Event::Mark(mark) => {
                let mark = tape.mark_of(mark);
                phase = Some((mark.step, mark.phase));
            }
            Event::Alloc { object, bytes, .. } if phase == Some((1, Phase::FORWARD)) => {
                born.insert(object, (index, bytes.get()));
            }
            Event::Free(object) => {
                if let Some((from, bytes)) = born.remove(&object) {
                    sum += u128::from(bytes) * (index - from) as u128;
                }
            }
            _ => {}
        }
    }
    sum
}

#[test]
fn offload_moves_residency_and_not_semantics() {
    let (plain, plain_books) = run(&setup());
    for what in [Offload::Activations, Offload::ActivationsPinned] {
        let (moved, books) = run(&Setup { offload: vec![what], ..setup() });
        assert_eq!(moved.flops, plain.flops, "the same is computed");
        let kept = |books: &Ledger| at_end(books, "forward", Category::Activation);
        assert!(kept(&books) < kept(&plain_books) / 20, "{} stays", kept(&books));
        let host = |phase: &str| {
            let row = books.phases.iter().find(|row| row.device == HOST && row.at.phase == phase).unwrap();
            row.end.requested.unwrap().get()
        };
        assert!(host("forward") > kept(&plain_books) - kept(&books), "what left is on the host");
        assert_eq!((host("load"), host("backward")), (0, 0));
        for category in [Category::Parameter, Category::Gradient, Category::OptimizerState] {
            assert_eq!(sizes(&moved.tape, category), sizes(&plain.tape, category), "{category}");
        }
    }
    let (moved, books) = run(&Setup { offload: vec![Offload::Optimizer], ..setup() });
    assert_eq!(moved.flops, plain.flops);
    assert!(
        at_end(&books, "update", Category::OptimizerState)
            < at_end(&plain_books, "update", Category::OptimizerState) / 20
    );
    assert_eq!(
        at_end(&books, "forward", Category::Activation),
        at_end(&plain_books, "forward", Category::Activation)
    );
}

#[test]
fn precision_changes_element_bytes() {
    let (wide, _) = run(&Setup { dtype: Some(Dtype::Fp32), ..setup() });
    let (narrow, _) = run(&Setup { dtype: Some(Dtype::Bf16), ..setup() });
    assert_eq!(wide.flops, narrow.flops);
    for category in [Category::Parameter, Category::OptimizerState] {
        let halves: Vec<u64> = sizes(&wide.tape, category).iter().map(|bytes| bytes / 2).collect();
        assert_eq!(sizes(&narrow.tape, category), halves, "{category}");
    }
    // A state of 8 bits has a byte an element, a scale for each block of 256 of them and a table of 256 values.
    let setup = Setup { optimizer: Optimizer::AdamW8bit, ..setup() };
    let states: BTreeSet<u64> = sizes(&run(&setup).0.tape, Category::OptimizerState).into_iter().collect();
    for elements in [64 * 64, 64 * 96] {
        assert!(states.is_superset(&BTreeSet::from([elements, elements / 256 * 4, 1024])), "{states:?}");
    }
}

#[test]
fn a_saving_is_zero_where_another_phase_takes_over_the_peak() {
    let model = Model::from_mlp_name("mlp:8x2048").unwrap().unwrap();
    let books = |setup: Setup| {
        let run = model.train(&Setup { seqs: Vec::new(), steps: 2, ..setup }, &GPUS[0]).unwrap();
        ledger::replay(&run.tape, None)
    };
    let form = |batch, checkpoint: &str| {
        let checkpoint = checkpoint.parse().unwrap();
        books(Setup { batch, checkpoint, optimizer_impl: Some(OptimizerImpl::Foreach), ..Setup::default() })
    };
    // AdamW with foreach holds one more copy of the weights in update, the peak of a small batch.
    let [plain, shorter] = ["none", "segments:2x4"].map(|checkpoint| form(2048, checkpoint));
    assert!(peak_of(&shorter, "forward") < peak_of(&plain, "forward"));
    assert_eq!((peak(&plain), peak(&shorter)), (peak_of(&plain, "update"), peak_of(&plain, "update")));
    // Of a larger batch the saving ends at the peak of update.
    let [plain, shorter] = ["none", "segments:2x4"].map(|checkpoint| form(16_384, checkpoint));
    assert_eq!(peak(&plain), peak_of(&plain, "backward"));
    let most = peak_of(&plain, "backward") - peak_of(&shorter, "backward");
    let saving = peak(&plain) - peak(&shorter);
    assert!(0 < saving && saving <= most, "{saving} of {most}");
    assert_eq!(peak(&shorter), peak_of(&shorter, "backward").max(peak_of(&shorter, "update")));
    // With the steps in backward, update makes nothing at all.
    let in_backward = books(Setup { batch: 512, optimizer_in_backward: true, ..Setup::default() });
    let rows = in_backward.phases.iter().filter(|row| row.at.phase == "update");
    assert!(rows.clone().count() == 2 && rows.clone().all(|row| row.peak.requested == row.end.requested));
}
