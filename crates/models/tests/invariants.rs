//! What holds for the tape of every model and setup.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::collections::BTreeMap;

use ledger::{Bytes, Category, Dtype, Event, Phase, Tape};
use models::{
    Attention, GPUS, Loss, Model, Offload, Optimizer, OptimizerImpl, Run, SdpaKernel, Setup, ZeroGrad,
};
use proptest::prelude::*;
use proptest::sample::select;

/// What is alive when each update ends, by category and name.
fn alive_between_steps(tape: &Tape) -> Vec<BTreeMap<(Category, String), u64>> {
    let mut alive = BTreeMap::new();
    let mut labels: Vec<_> = tape.objects().iter().map(|object| object.label).collect();
    let mut boundaries = Vec::new();
    let mut phase = None;
    let mut close = |alive: &BTreeMap<u32, Bytes>, labels: &[ledger::LabelId]| {
        let mut rows = BTreeMap::new();
        for (object, bytes) in alive {
            let label = tape.label(labels[*object as usize]);
            *rows.entry((label.category, tape.name(label.name).to_owned())).or_insert(0) += bytes.get();
        }
        boundaries.push(rows);
    };
    for event in tape.events() {
        match event {
            Event::Alloc { object, bytes, .. } => {
                assert!(alive.insert(object.0, bytes).is_none(), "object {} is made once", object.0);
            }
            Event::Free(object) => {
                assert!(alive.remove(&object.0).is_some(), "object {} is freed once", object.0);
            }
            Event::Relabel(object, label) => labels[object.0 as usize] = label,
            Event::Mark(mark) => {
                if phase == Some(Phase::UPDATE) {
                    close(&alive, &labels);
                }
                phase = Some(tape.mark_of(mark).phase);
            }
            _ => {}
        }
    }
    close(&alive, &labels);
    boundaries
}

fn setups() -> impl Strategy<Value = Setup> {
    let numbers = (1..4_u64, prop::collection::vec(1..90_u64, 1..3), 1..3_u32, any::<bool>(), any::<bool>());
    let words = (
        select(vec![Dtype::Fp32, Dtype::Bf16, Dtype::Fp16]),
        select(vec![None, Some(Dtype::Bf16), Some(Dtype::Fp16)]),
        select(Attention::ALL),
        select(SdpaKernel::ALL),
        (
            select(vec![
                "none",
                "full",
                "every:2",
                "layers:1",
                "segments:2",
                "selective:mm,addmm,bmm,_softmax",
            ]),
            any::<bool>(),
            select(vec![
                vec![],
                vec![Offload::Activations],
                vec![Offload::ActivationsPinned],
                vec![Offload::Checkpoints],
                vec![Offload::Optimizer],
                vec![Offload::Parameters],
            ]),
        ),
        select(Optimizer::ALL),
        select(OptimizerImpl::ALL),
        select(ZeroGrad::ALL),
        (select(vec![0.0, 0.9]), select(vec![None, Some(0.1)]), any::<[bool; 4]>()),
    );
    (numbers, words).prop_map(|((batch, seqs, accumulate, keep_outputs, clip), words)| {
        let (
            dtype,
            autocast,
            attention,
            kernel,
            (checkpoint, checkpoint_reentrant, offload),
            optimizer,
            form,
            zero_grad,
            hyper,
        ) = words;
        let (momentum, weight_decay, [nesterov, amsgrad, capturable, optimizer_in_backward]) = hyper;
        let setup = Setup {
            batch,
            seqs,
            dtype: Some(dtype),
            autocast,
            attention,
            sdpa_kernel: kernel,
            checkpoint: checkpoint.parse().unwrap(),
            checkpoint_reentrant,
            offload,
            optimizer,
            optimizer_impl: Some(form),
            momentum,
            nesterov,
            weight_decay,
            amsgrad,
            capturable,
            optimizer_in_backward,
            accumulate,
            zero_grad,
            clip_grad_norm: clip.then_some(1.0),
            keep_outputs,
            ..Setup::default()
        };
        if setup.contradiction().is_none() {
            return setup;
        }
        let plain = Setup { nesterov: false, amsgrad: false, capturable: false, ..setup };
        Setup {
            optimizer_impl: None,
            optimizer_in_backward: false,
            checkpoint_reentrant: false,
            offload: Vec::new(),
            ..plain
        }
    })
}

fn models() -> impl Strategy<Value = Model> {
    let families: Vec<&str> =
        Model::families().into_iter().filter(|name| !["mlp", "gpt2"].contains(name)).collect();
    let extents = (1..3_u64, 1..3_u64, select(vec![4_u64, 12, 20, 64]), select(vec![1_u64, 16, 4096]));
    let decoder = (select(families), extents, any::<[bool; 5]>()).prop_map(
        |(family, (kv, groups, head, window), [tied, cache, bias, dropout, other])| {
            format!(
                r#"{{"model_type": "{family}", "vocab_size": 90, "hidden_size": 48, "intermediate_size": 40,
                "num_hidden_layers": 2, "num_attention_heads": {}, "num_key_value_heads": {kv}, "head_dim": {head},
                "tie_word_embeddings": {tied}, "use_cache": {cache}, "attention_bias": {bias}, "mlp_bias": {bias},
                "attention_dropout": {p}, "resid_pdrop": {p}, "sliding_window": {window}, "use_sliding_window": {other},
                "max_window_layers": 1, "partial_rotary_factor": {}, "num_local_experts": 4, "num_experts": 4,
                "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": {other},
                "output_router_logits": {other}}}"#,
                kv * groups,
                if other { 0.5 } else { 1.0 },
                p = if dropout { 0.1 } else { 0.0 },
            )
        },
    );
    let gpt2 = (1..4_u64, any::<[bool; 3]>()).prop_map(|(heads, [tied, cache, dropout])| {
        let p = if dropout { 0.1 } else { 0.0 };
        format!(
            r#"{{"model_type": "gpt2", "vocab_size": 90, "n_embd": {}, "n_head": {heads}, "n_layer": 2, "n_positions": 90,
            "tie_word_embeddings": {tied}, "use_cache": {cache}, "resid_pdrop": {p}, "embd_pdrop": {p}, "attn_pdrop": {p}}}"#,
            heads * 16
        )
    });
    prop_oneof![4 => decoder, 1 => gpt2].prop_map(|config| Model::from_config(&config).unwrap())
}

fn check(run: &Run, setup: &Setup) {
    run.tape.validate().unwrap();
    let first = alive_between_steps(&run.tape);
    for (step, rows) in first.iter().enumerate() {
        for ((category, name), bytes) in rows {
            let kept = match category {
                Category::Parameter | Category::Buffer | Category::OptimizerState | Category::Input => true,
                // An optimizer on the host has copies of the parameters and of their gradients.
                Category::MasterWeight => setup.offload.contains(&Offload::Optimizer),
                Category::Gradient => setup.zero_grad == ZeroGrad::Keep || name.ends_with(".host"),
                // The loss that the script still names, and the output where it keeps one.
                _ => {
                    name.ends_with("loss") || name.starts_with("loss.") || setup.keep_outputs
                    // The node of a reentrant checkpoint, and with it its arguments, lives as long as the loss.
                    || setup.checkpoint_reentrant
                }
            };
            assert!(kept, "{bytes} bytes of {category} `{name}` are alive after step {}", step + 1);
        }
        let of = |wanted: Category| -> u64 {
            rows.iter().filter(|((category, _), _)| *category == wanted).map(|(_, bytes)| bytes).sum()
        };
        assert_eq!(of(Category::Parameter), run.parameters.bytes);
        if setup.zero_grad == ZeroGrad::Keep {
            assert_eq!(of(Category::Gradient), run.parameters.bytes);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn storages_are_freed_once_and_only_the_script_s_names_outlive_a_step(model in models(), setup in setups()) {
        // A kernel that the dtype or the head size rules out is refused with a sentence.
        if let Ok(run) = model.train(&setup, &GPUS[0]) {
            check(&run, &setup);
        } else {
            prop_assert_ne!(setup.sdpa_kernel, SdpaKernel::Default);
        }
    }

    #[test]
    fn the_same_holds_for_mlps(layers in 1..5_u64, width in 1..70_u64, sum in any::<bool>(), setup in setups()) {
        let model = Model::from_mlp_name(&format!("mlp:{layers}x{width}")).unwrap().unwrap();
        let loss = Some(if sum { Loss::Sum } else { Loss::MeanSquare });
        let setup = Setup { seqs: Vec::new(), loss, ..setup };
        if model.contradiction(&setup).is_none() {
            check(&model.train(&setup, &GPUS[0]).unwrap(), &setup);
        }
    }
}
