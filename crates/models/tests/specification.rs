//! Vectors of `memory-accounting`, parts 3 and 5: what autograd keeps of an MLP, and what it computes.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use ledger::{Category, Dtype, Event, Phase};
use models::{Checkpoint, Flops, GPUS, Loss, Model, Run, Setup};

fn mlp(layers: u64, width: u64, batch: u64, checkpoint: Checkpoint) -> Run {
    let setup = Setup {
        batch,
        dtype: Some(Dtype::Fp32),
        loss: Some(Loss::Sum),
        checkpoint,
        steps: 1,
        ..Setup::default()
    };
    let model = Model::from_mlp_name(&format!("mlp:{layers}x{width}")).unwrap().unwrap();
    model.train(&setup, &GPUS[0]).unwrap()
}

/// Bytes that autograd keeps when the forward pass ends, once a storage, parameters apart.
fn saved_at_end_of_forward(run: &Run) -> u64 {
    let mut alive = std::collections::BTreeMap::new();
    for event in run.tape.events() {
        match event {
            Event::Alloc { object, bytes, .. } => drop(alive.insert(object, bytes.get())),
            Event::Free(object) => drop(alive.remove(&object)),
            Event::Mark(mark) if run.tape.mark_of(mark).phase == Phase::BACKWARD => break,
            _ => {}
        }
    }
    let saved = |object: &ledger::ObjectId| {
        let label = run.tape.label(run.tape.object(*object).label);
        label.saved && label.category != Category::Parameter
    };
    alive.iter().filter(|(object, _)| saved(object)).map(|(_, bytes)| bytes).sum()
}

#[test]
fn memory_accounting_part_3_saved_activations_are_l_plus_1_times_b_d_4() {
    for (layers, batch) in [(4, 32), (8, 32), (8, 64), (16, 64)] {
        let run = mlp(layers, 512, batch, Checkpoint::None);
        assert_eq!(
            saved_at_end_of_forward(&run),
            (layers + 1) * batch * 512 * 4,
            "L = {layers}, B = {batch}"
        );
    }
}

#[test]
fn memory_accounting_part_5_flops_of_backward_are_2l_minus_1_forwards_over_l() {
    for layers in [1, 2, 4, 16] {
        let flops = mlp(layers, 256, 32, Checkpoint::None).flops;
        assert_eq!(flops.forward, 2 * 32 * 256 * 256 * layers);
        assert_eq!(flops.backward * layers, flops.forward * (2 * layers - 1));
        assert_eq!((flops.recompute, flops.update), (0, 0));
    }
}

#[test]
fn memory_accounting_part_5_checkpointing_adds_one_forward() {
    let total = |flops: Flops| flops.forward + flops.backward + flops.recompute;
    let plain = mlp(16, 256, 32, Checkpoint::None).flops;
    let checkpointed = mlp(16, 256, 32, Checkpoint::Full).flops;
    assert_eq!(total(plain) * 16, plain.forward * 47);
    assert_eq!(total(checkpointed) * 16, plain.forward * 63);
    assert_eq!(checkpointed.recompute, plain.forward);
}

#[test]
fn memory_accounting_part_5_training_goes_from_6nd_to_8nd() {
    // A deep and narrow stack, where the embedding's and the head's share is small: the products of the
    // layers alone are counted as 2 N D forward, 4 N D backward and 2 N D again.
    let config = r#"{"model_type": "llama", "vocab_size": 8, "hidden_size": 512, "intermediate_size": 2048,
        "num_hidden_layers": 24, "num_attention_heads": 8, "max_position_embeddings": 64}"#;
    let flops = |checkpoint| {
        let setup = Setup { batch: 4, seqs: vec![8], checkpoint, steps: 1, ..Setup::default() };
        let run = Model::from_config(config).unwrap().train(&setup, &GPUS[0]).unwrap();
        let flops = run.flops;
        let total = (flops.forward + flops.backward + flops.recompute) as f64;
        total / (run.parameters.total as f64 * 32.0)
    };
    let (plain, checkpointed) = (flops(Checkpoint::None), flops(Checkpoint::Full));
    assert!((plain - 6.0).abs() < 0.05, "{plain} N D");
    // The recomputation stops before the last product of a layer, whose result nobody needs.
    assert!(checkpointed > 7.4 && checkpointed < 8.0, "{checkpointed} N D");
}
