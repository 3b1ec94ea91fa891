//! Every vector of the specification that the command line reaches, by document and section.

use serde_json::{Value, json};

use crate::run::{Folder, run};

const MIB: u64 = 1 << 20;

fn state(name: &str, category: &str, mib: f64, from: &str, to: &str, device: &str) -> Value {
    json!({
        "name": name, "category": category, "size_mb": mib, "start_phase": from, "end_phase": to,
        "device": device, "persistent": from == "load",
    })
}

/// unified-training-memory-ledger, step 4: the sample states; `activations` with another end and device.
fn sample(activations_end: &str, activations_device: &str) -> String {
    json!([
        state("parameters", "parameter", 800.0, "load", "zero_grad", "gpu"),
        state("optimizer_state", "optimizer_state", 600.0, "load", "zero_grad", "gpu"),
        state("activations", "activation", 300.0, "forward", activations_end, activations_device),
        state("gradients", "gradient", 400.0, "backward", "update", "gpu"),
        state("forward_workspace", "workspace", 200.0, "forward", "forward", "gpu"),
        state("collective_buffer", "communication_buffer", 100.0, "backward", "backward", "gpu"),
        state("offloaded_activation", "activation", 250.0, "forward", "backward", "cpu"),
    ])
    .to_string()
}

fn ledgers() -> Folder {
    Folder::new()
        .with("baseline.json", sample("backward", "gpu"))
        .with("checkpoint.json", sample("forward", "gpu"))
        .with("offload.json", sample("backward", "cpu"))
}

/// memory-profiling-and-optimization, Q1: the network 512-1024-512, by its own four phases.
fn network() -> Folder {
    let parameters = 512 * 1024 + 1024 + 1024 * 512 + 512;
    let activation = 16 * 64 * 512 * 4;
    let mib = |bytes: u64| bytes as f64 / MIB as f64;
    let (load, forward, backward, update) = ("after_load", "forward_peak", "backward_peak", "after_update");
    let states = json!([
        state("parameters", "parameter", mib(parameters * 4), load, update, "gpu"),
        state("gradients", "gradient", mib(parameters * 4), backward, update, "gpu"),
        state("optimizer_state", "optimizer_state", mib(parameters * 8), forward, update, "gpu"),
        state("saved_activations", "activation", mib(activation), forward, backward, "gpu"),
        state("temporary", "workspace", mib(activation / 2), forward, backward, "gpu"),
    ]);
    let timeline = json!({ "states": states, "phases": [load, forward, backward, update] });
    Folder::new().with("network.json", timeline.to_string())
}

/// The predicted bytes of each of `phases`.
fn totals<const N: usize>(folder: &Folder, file: &str, phases: [&str; N]) -> [u64; N] {
    phases.map(|phase| {
        let line =
            format!("reconcile {file} --at {phase} --allocated 1 --reserved 1 --capacity 1GiB --format json");
        folder.run(&line).json()["predicted_bytes"].as_u64().unwrap()
    })
}

#[test]
fn unified_ledger_phase_totals() {
    let totals = totals(&ledgers(), "baseline.json", ["forward", "backward", "update"]);
    assert_eq!(totals, [1900, 2200, 1800].map(|mib| mib * MIB));
}

#[test]
fn unified_ledger_peak_and_contributors_in_order() {
    let compared = ledgers().run("compare baseline.json offload.json --format json").json();
    let peak = &compared["baseline"]["peak"];
    assert_eq!((&peak["phase"], &peak["bytes"]), (&json!("backward"), &json!(2200 * MIB)));
    let names: Vec<&str> =
        peak["contributors"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["parameters", "optimizer_state", "gradients", "activations", "collective_buffer"]);
}

#[test]
fn unified_ledger_candidates() {
    let answer = ledgers().run("compare baseline.json checkpoint.json offload.json --format json");
    assert_eq!(answer.exit, Some(0));
    let candidates = answer.json()["candidates"].clone();
    for (candidate, name, phase) in [(0, "checkpoint", "forward"), (1, "offload", "backward")] {
        let candidate = &candidates[candidate];
        assert_eq!(candidate["name"], name);
        assert_eq!(candidate["peak"]["phase"], phase);
        assert_eq!(candidate["peak"]["bytes"], 1900 * MIB);
        assert_eq!(candidate["saving_bytes"], 300 * MIB);
    }
}

/// unified-training-memory-ledger, step 4, test_lifecycle_contract, and what else a state may get wrong.
#[test]
fn unified_ledger_invalid_states() {
    let valid = state("p", "parameter", 800.0, "load", "zero_grad", "gpu");
    let with = |key: &str, value: Value| {
        let mut state = valid.clone();
        state[key] = value;
        json!([state]).to_string()
    };
    let invalid = [
        with("size_mb", json!(-1.0)),
        with("size_mb", json!(true)),
        with("size_mb", json!("800")),
        with("size_mb", json!(1e300)),
        with("category", json!("unknown")),
        with("device", json!("tpu")),
        with("end_phase", json!("nowhere")),
        with("persistent", json!(1)),
        with("name", json!("")),
        json!([state("p", "parameter", 1.0, "backward", "forward", "gpu")]).to_string(),
        json!([valid, valid]).to_string(),
        json!([{ "name": "p" }]).to_string(),
        "[]".into(),
        "[{\"size_mb\": NaN}]".into(),
    ];
    for states in invalid {
        let folder = ledgers().with("invalid.json", &states);
        let answer = folder.run("compare baseline.json invalid.json");
        assert!(answer.sentence().contains("invalid.json"), "{states}: {}", answer.stderr);
    }
}

#[test]
fn unified_ledger_candidate_names_are_neither_empty_nor_doubled() {
    let folder = ledgers();
    assert!(folder.run("compare baseline.json =offload.json").sentence().contains("empty name"));
    assert!(folder.run("compare baseline.json baseline=offload.json").sentence().contains("`baseline`"));
    assert_eq!(folder.run("compare baseline.json").exit, Some(2));
}

#[test]
fn profiling_q1_and_q2_the_network_by_phase() {
    let phases = ["after_load", "forward_peak", "backward_peak", "after_update"];
    let totals = totals(&network(), "network.json", phases);
    assert_eq!(totals, [4_200_448, 15_747_072, 19_947_520, 16_801_792]);
    // The overlap bound is the largest of them: what is predicted where no phase is named.
    let line = "reconcile network.json --allocated 1 --reserved 1 --capacity 1GiB --format json";
    let peak = network().run(line).json();
    assert_eq!(
        (&peak["predicted_bytes"], &peak["at"]["phase"]),
        (&json!(19_947_520), &json!("backward_peak"))
    );
}

#[test]
fn profiling_q3_micro_batch_16x1_against_4x4() {
    let batch = |line: &str| run(&format!("plan mlp:4x512 {line} --format json")).json();
    let (whole, parts) = (batch("--batch 16"), batch("--batch 4 --accumulate 4"));
    assert_eq!(
        whole["batch"],
        json!({"micro_batch": 16, "accumulate": 1, "world_size": 1, "effective_batch": 16, "forward_backward_rounds": 1})
    );
    assert_eq!(
        parts["batch"],
        json!({"micro_batch": 4, "accumulate": 4, "world_size": 1, "effective_batch": 16, "forward_backward_rounds": 4})
    );
    // What is saved at the end of the forward pass shrinks to a quarter; parameters do not change.
    let forward = |plan: &Value| plan["phases"][1]["end_by_category"]["activation"].as_u64().unwrap() - 4;
    assert_eq!(forward(&whole), 4 * forward(&parts));
    assert_eq!(whole["parameters"], parts["parameters"]);
}

#[test]
fn profiling_q4_dtype_and_saved_fraction() {
    let rows = run("tradeoff --batch 8 --seq 32 --hidden 512 --format json").json()["rows"].clone();
    let rows: Vec<(&str, u64, f64)> = rows
        .as_array()
        .unwrap()
        .iter()
        .map(|row| {
            let name = row["name"].as_str().unwrap();
            let bytes = row["saved_activation_bytes"].as_u64().unwrap();
            (name, bytes, row["extra_forward_fraction"].as_f64().unwrap())
        })
        .collect();
    assert_eq!(
        rows,
        [
            ("fp32 / no checkpoint", MIB / 2, 0.0),
            ("bf16 / no checkpoint", MIB / 4, 0.0),
            ("fp32 / save 50%", MIB / 4, 0.5),
            ("bf16 / save 50%", MIB / 8, 0.5),
        ]
    );
    for range in [
        "--saved-fraction 0",
        "--saved-fraction 1.1",
        "--saved-fraction nan",
        "--extra-forward -0.1",
        "--extra-forward 2",
        "--dtype 0",
    ] {
        let answer = run(&format!("tradeoff --batch 8 --seq 32 --hidden 512 {range}"));
        assert_eq!((answer.exit, answer.stdout.as_str()), (Some(2), ""), "{range}");
    }
}

#[test]
fn profiling_q6_three_signals() {
    let (predicted, mib) = (19_947_520, MIB);
    let (allocated, reserved, capacity) = (predicted + 3 * mib, predicted + 10 * mib, predicted + 11 * mib);
    let line = format!(
        "reconcile network.json --at backward_peak --allocated {allocated} --reserved {reserved} --capacity {capacity} --format json"
    );
    let answer = network().run(&line);
    assert_eq!(answer.exit, Some(1), "the books do not agree");
    let found = answer.json();
    assert_eq!(found["estimate_difference_bytes"], 3 * mib);
    assert_eq!(found["allocator_gap_bytes"], 7 * mib);
    assert_eq!(found["budget_margin_bytes"], mib);
    assert_eq!(found["alert_fraction"], 0.1);
    let signals = ["inspect_estimate_difference", "inspect_allocator_retained_space", "capacity_pressure"];
    assert_eq!(found["signals"], json!(signals));
    assert_eq!(found["dominant_object"], "optimizer_state");
}

#[test]
fn profiling_q6_below_the_estimate_keeps_its_sign() {
    let folder = Folder::new()
        .with("p.json", json!([state("p", "parameter", 20.0, "load", "update", "gpu")]).to_string());
    let answer =
        folder.run("reconcile p.json --allocated 18MiB --reserved 19MiB --capacity 30MiB --format json");
    assert_eq!(answer.exit, Some(0));
    assert_eq!(answer.json()["estimate_difference_bytes"], -2 * MIB.cast_signed());
    for snapshot in [
        "--allocated 22MiB --reserved 21MiB --capacity 30MiB",
        "--allocated 22MiB --reserved 31MiB --capacity 30MiB",
        "--allocated nan --reserved 25MiB --capacity 30MiB",
        "--allocated -1 --reserved 25MiB --capacity 30MiB",
        "--allocated 0 --reserved 0 --capacity 0",
    ] {
        let answer = folder.run(&format!("reconcile p.json {snapshot}"));
        assert_eq!((answer.exit, answer.stdout.as_str()), (Some(2), ""), "{snapshot}");
    }
}

#[test]
fn accounting_1_and_6_bytes_a_parameter_and_cards() {
    let budget = run("budget --gpus 8 --format json").json();
    let recipes: Vec<(u64, String)> = budget["recipes"]
        .as_array()
        .unwrap()
        .iter()
        .take(3)
        .map(|row| {
            let largest = row["largest_model_nominal"].as_f64().unwrap() / 1e9;
            (row["bytes_per_parameter"].as_u64().unwrap(), format!("{largest:.1}"))
        })
        .collect();
    assert_eq!(recipes, [(16, "40.0".into()), (12, "53.3".into()), (16, "40.0".into())]);
    let cards: Vec<u64> = budget["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["cards_nominal"].as_u64().unwrap())
        .collect();
    assert_eq!(cards, [1, 1, 2, 14, 81]);
}

/// memory-accounting, part 3: a tensor of batch x width a layer, and the input: (L + 1)*B*D*4.
#[test]
fn accounting_3_saved_activations_of_an_mlp() {
    for (layers, batch) in [(4, 32), (8, 32), (8, 64), (16, 64)] {
        let plan = run(&format!("plan mlp:{layers}x512 --batch {batch} --format json")).json();
        let end = &plan["phases"][1]["end_by_category"];
        // The loss of 4 bytes is an activation too.
        let saved = end["activation"].as_u64().unwrap() - 4 + end["input"].as_u64().unwrap();
        assert_eq!(saved, (layers + 1) * batch * 512 * 4, "{layers} layers, batch {batch}");
    }
}

#[test]
fn accounting_5_checkpoint_units() {
    let plan = run("checkpoint-plan --layers 16 --format json").json();
    let rows: Vec<(u64, f64)> = plan["segments"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (row["segment"].as_u64().unwrap(), row["units"].as_f64().unwrap()))
        .collect();
    assert_eq!(rows, [(1, 17.0), (2, 10.0), (4, 8.0), (8, 10.0), (16, 17.0)]);
    assert_eq!((&plan["best"]["segment"], &plan["units_without"]), (&json!(4), &json!(16)));
    for range in ["--layers 0", "--layers 16 --segment 0", "--layers 16 --segment 17", "--layers -1"] {
        assert_eq!(run(&format!("checkpoint-plan {range}")).exit, Some(2), "{range}");
    }
}

/// A model is searched as its layers are: what is found holds the budget when it is planned, and fewer layers
/// recomputed would not.
#[test]
fn a_checkpoint_plan_under_a_budget_is_what_plan_says() {
    let setup = "--batch 8 --seq 256 --steps 2";
    let answer = run(&format!("checkpoint-plan gpt2 --budget 4GiB {setup} --format json")).json();
    let best = &answer["best"];
    let peak = |checkpoint: &str| {
        let plan = run(&format!("plan gpt2 {setup} --checkpoint {checkpoint} --format json")).json();
        plan["peaks"]["allocated"]["bytes"].as_u64().unwrap()
    };
    let form = best["checkpoint"].as_str().unwrap();
    assert_eq!(best["peak_allocated_bytes"], peak(form));
    assert!(peak(form) <= 4 << 30);
    let layers: u64 = form.strip_prefix("segments:").unwrap().split(',').map(segments).sum();
    assert!(peak(&format!("segments:{}x1", layers - 1)) > 4 << 30);
    let rows = answer["strategies"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["none", "every layer", "square root", "least memory"]);
    let peak_of = |row: usize| rows[row]["peak_allocated_bytes"].as_u64().unwrap();
    assert!(peak_of(3) <= peak_of(2) && peak_of(2) < peak_of(0));
    assert_eq!(run("checkpoint-plan gpt2 --budget 1GiB --seq 64 --format json").json()["best"], json!(null));
    for refused in [
        "gpt2",
        "gpt2 --budget 1GiB --layers 4",
        "--budget 1GiB",
        "--layers 4 --budget 1GiB",
        "--layers 4 --batch 2",
        "",
    ] {
        assert_eq!(run(&format!("checkpoint-plan {refused}")).exit, Some(2), "{refused}");
    }
    assert_eq!(
        run("checkpoint-plan gpt2 --budget 1GiB --checkpoint full").sentence(),
        "`--checkpoint` is what checkpoint-plan searches"
    );
}

/// The layers of `N` or `NxK`.
fn segments(part: &str) -> u64 {
    part.split('x').map(|number| number.parse::<u64>().unwrap()).product()
}

/// memory-accounting, part 5: backward is (2L - 1)/L forwards, as the input needs no gradient; all
/// together 47/16 forwards without checkpoints and 63/16 with them.
#[test]
fn accounting_5_flops_of_an_mlp() {
    let flops = |line: &str| {
        let plan = run(&format!("plan mlp:16x256 --batch 32 --loss sum {line} --format json")).json();
        ["forward", "backward", "recompute"].map(|part| plan["flops"][part].as_u64().unwrap())
    };
    let forward = 2 * 32 * 256 * 256 * 16;
    assert_eq!(flops(""), [forward, forward * 31 / 16, 0]);
    assert_eq!(flops("--checkpoint full"), [forward, forward * 31 / 16, forward]);
}

/// ZeRO (arXiv 1910.02054), figure 1: 120, 31.4, 16.6 and 1.9 GB of 7.5B parameters on 64 ranks.
#[test]
fn budgets_of_a_rank_are_those_of_the_papers() {
    let csv = run("budget --params 7.5B --parallel zero2 --world-size 64 --format csv").stdout;
    let sum = |parallel: &str, recipe: &str| {
        let line = csv.lines().find(|line| line.contains(&format!(",{parallel},{recipe}"))).unwrap();
        let bytes: f64 = line.split(',').rev().nth(2).unwrap().parse().unwrap();
        format!("{:.1}", bytes / 1e9)
    };
    let zero = ["ddp", "zero1", "zero2", "zero3"].map(|parallel| sum(parallel, "\"fp16"));
    assert_eq!(zero, ["120.0", "31.4", "16.6", "1.9"]);
    assert_eq!(sum("megatron-do", "\"mixed"), "46.4");
    let model =
        run("budget gpt2 --parallel hsdp --world-size 6 --shard-size 3 --rank 5 --format json").json();
    let rows = model["models"][0]["rows"].as_array().unwrap();
    let row = rows.iter().find(|row| row["parallel"] == "hsdp" && row["recipe"] == "fp32").unwrap();
    // The third rank of three has 16751 of the 16753 rows of the embedding that it keeps, and 341 of 342 positions.
    assert_eq!(row["padding_bytes"], 2 * 4 * 768 * (2 + 2));
}

#[test]
fn budgets_of_ranks_that_are_none_are_refused() {
    let refused = |line: &str| {
        let answer = run(&format!("budget {line}"));
        assert_eq!((answer.exit, answer.stdout.as_str()), (Some(2), ""), "{line}");
        answer.sentence().to_owned()
    };
    assert_eq!(
        refused("--parallel zero1 --world-size 0"),
        "invalid value '0' for '--world-size <N>': it must be at least 1"
    );
    assert_eq!(
        refused("--parallel zero1 --world-size 4 --rank 4"),
        "`--rank 4`: ranks count from 0, and `--world-size` is 4"
    );
    assert_eq!(
        refused("--parallel hsdp --world-size 4 --shard-size 3"),
        "`--shard-size 3`: 4 ranks of `--world-size` are not a multiple of it"
    );
    assert_eq!(
        refused("--parallel hsdp --world-size 4"),
        "`--parallel hsdp` needs `--shard-size`, the ranks that share one copy of the parameters"
    );
    assert_eq!(
        refused("--parallel zero1 --world-size 4 --shard-size 2"),
        "`--shard-size` is of hsdp, and `--parallel` is zero1"
    );
    for line in
        ["gpt2", "--parallel ddp", "--world-size 2", "--rank 0", "--parallel ddp --world-size 2 --rank -1"]
    {
        refused(line);
    }
}
