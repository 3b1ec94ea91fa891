//! `reconcile PREDICTED EVIDENCE`: agreement, and the setting that was another.

use crate::run::Folder;

const SETUP: &str = "--batch 4 --seq 256 --format json";

/// The ledger of a plan under `settings`, in a file of `folder`.
fn planned<'a>(folder: &Folder, name: &'a str, settings: &str) -> &'a str {
    let answer = folder.run(&format!("plan gpt2 {settings} {SETUP} -o {name}"));
    assert_eq!(answer.exit, Some(0), "{}", answer.stderr);
    name
}

#[test]
fn a_run_as_it_was_predicted_agrees() {
    let folder = Folder::new();
    let plan = planned(&folder, "plan.json", "");
    let answer = folder.run(&format!("reconcile {plan} {plan} --format json"));
    assert_eq!(answer.exit, Some(0), "{}", answer.stderr);
    let document = answer.json();
    assert_eq!(document["estimate_difference_bytes"], 0);
    assert_eq!(document["evidence"]["unexplained_bytes"], 0);
    assert!(document["rows"].as_array().unwrap().iter().all(|row| row["reason"].is_null()));
}

#[test]
fn the_setting_that_was_another_is_named_and_rows_sum_to_the_difference() {
    let folder = Folder::new();
    let plan = planned(&folder, "plan.json", "");
    for (setting, reason) in [
        ("--attention eager", "other_implementation"),
        ("--checkpoint full", "other_setting"),
        ("--dtype bf16", "other_setting"),
        ("--torch 2.6", "other_version"),
        ("--optimizer sgd", "other_setting"),
    ] {
        let found = planned(&folder, "found.json", setting);
        let answer = folder.run(&format!("reconcile {plan} {found} --format json"));
        assert_eq!(answer.exit, Some(1), "{setting}: {}", answer.stderr);
        let document = answer.json();
        assert_eq!(document["evidence"]["setting"]["setting"], setting);
        assert_eq!(document["evidence"]["setting"]["difference_bytes"], 0, "{setting}");
        let reasons = document["evidence"]["by_reason"].as_array().unwrap();
        assert!(reasons.iter().any(|line| line["reason"] == reason), "{setting}: {reasons:?}");
        let rows = document["rows"].as_array().unwrap();
        let sum: i64 = rows.iter().map(|row| row["difference_bytes"].as_i64().unwrap()).sum();
        assert_eq!(Some(sum), document["estimate_difference_bytes"].as_i64(), "{setting}");
        let categories = document["evidence"]["categories"].as_array().unwrap();
        let sum: i64 = categories.iter().map(|line| line["difference_bytes"].as_i64().unwrap()).sum();
        assert_eq!(Some(sum), document["estimate_difference_bytes"].as_i64(), "{setting}");
    }
}

#[test]
fn evidence_and_numbers_are_one_or_the_other() {
    let folder = Folder::new();
    let plan = planned(&folder, "plan.json", "");
    for settings in ["", "--allocated 1GiB", "--at update"] {
        let answer = folder.run(&format!("reconcile {plan} {settings}"));
        assert_eq!((answer.exit, answer.stdout.as_str()), (Some(2), ""), "{settings}");
    }
}

/// The plan under `settings`, as the log of a run that prints totals when each step is over: one row for each of six
/// steps, each with `more` bytes above the one before.
fn log(folder: &Folder, settings: &str, more: u64) -> String {
    let plan = folder.run(&format!("plan gpt2 {settings} {SETUP}")).json();
    let phases = plan["phases"].as_array().unwrap();
    let last = |step: u64| {
        let mut rows = phases.iter().filter(|row| row["step"] == step && row["phase"] == "update");
        rows.next_back().unwrap()["end"].clone()
    };
    let peak = |step: u64| {
        let rows = phases.iter().filter(|row| row["step"].as_u64().unwrap() <= step);
        rows.map(|row| row["peak"]["allocated_bytes"].as_u64().unwrap()).max().unwrap()
    };
    let row = |step: u64| {
        let (planned, kept) = (step.min(2) + 1, step * more);
        let end = last(planned);
        let (allocated, reserved) = (&end["allocated_bytes"], &end["reserved_bytes"]);
        let (allocated, reserved) = (allocated.as_u64().unwrap() + kept, reserved.as_u64().unwrap() + kept);
        format!("{step},{allocated},{reserved},{}\n", peak(planned) + kept)
    };
    let rows: String = (0..6).map(row).collect();
    format!("step,allocated_bytes,reserved_bytes,max_allocated_bytes\n{rows}")
}

#[test]
fn a_log_of_steps_is_evidence() {
    let folder = Folder::new();
    let plan = planned(&folder, "plan.json", "");
    let reconciled = |text: String| {
        let answer = folder.run_with(&format!("reconcile {plan} - --format json"), text.as_bytes());
        (answer.exit, answer.json())
    };
    let (exit, document) = reconciled(log(&Folder::new(), "", 0));
    assert_eq!((exit, &document["estimate_difference_bytes"]), (Some(0), &0.into()));
    let steps = document["evidence"]["steps"].as_array().unwrap().clone();
    assert_eq!(steps.len(), 18);
    assert!(steps.iter().all(|line| line["difference_bytes"] == 0), "{steps:?}");
    assert!(steps.iter().filter(|line| line["figure"] == "allocated").all(|line| line["end_of"] == "update"));

    let (exit, document) = reconciled(log(&Folder::new(), "--attention eager", 0));
    assert_eq!(exit, Some(1));
    assert_eq!(document["evidence"]["setting"]["setting"], "--attention eager");
    assert_eq!(document["evidence"]["by_reason"][0]["reason"], "other_implementation");

    let (exit, document) = reconciled(log(&Folder::new(), "", 100 << 20));
    assert_eq!(exit, Some(1));
    assert_eq!(document["evidence"]["setting"], serde_json::Value::Null);
    assert_eq!(document["evidence"]["by_reason"][0]["reason"], "kept_by_reference");
    assert_eq!(document["estimate_difference_bytes"], 500 << 20);
}

#[test]
fn two_logs_are_held_against_each_other() {
    let folder = Folder::new()
        .with("one.csv", log(&Folder::new(), "", 0))
        .with("other.csv", log(&Folder::new(), "", 100 << 20));
    let document = folder.run("reconcile one.csv other.csv --format json").json();
    assert_eq!(document["estimate_difference_bytes"], 500 << 20);
    assert_eq!(document["evidence"]["by_reason"][0]["reason"], "kept_by_reference");
    assert_eq!(folder.run("reconcile one.csv one.csv").exit, Some(0));
}

#[test]
fn an_out_of_memory_message_is_held_against_what_the_plan_has_in_place() {
    let folder = Folder::new();
    let capacity = "--capacity 3300MiB";
    let plan = folder.run(&format!("plan gpt2 {capacity} {SETUP} -o tight.json"));
    assert_eq!(plan.exit, Some(1), "{}", plan.stderr);
    let plan: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.path().join("tight.json")).unwrap()).unwrap();
    let oom = &plan["oom"];
    let mib = |bytes: f64| format!("{:.2} MiB", bytes / f64::from(1 << 20));
    let gib = |bytes: f64| format!("{:.2} GiB", bytes / f64::from(1 << 30));
    let of = |value: &serde_json::Value| value.as_u64().unwrap() as f64;
    let (held, free) = (&oom["held"], of(&oom["device_free_bytes"]));
    let (allocated, reserved) = (of(&held["allocated_bytes"]), of(&held["reserved_bytes"]));
    let total = of(&plan["devices"][0]["capacity_bytes"]);
    let message = format!(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of {} of which {} \
         is free. Including non-PyTorch memory, this process has {} memory in use. Of the allocated memory {} is \
         allocated by PyTorch, and {} is reserved by PyTorch but unallocated.\n",
        mib(of(&oom["device_request_bytes"])),
        gib(total),
        mib(free),
        gib(total - free),
        gib(allocated),
        mib(reserved - allocated),
    );
    let folder = folder.with("oom.txt", message);
    let document = folder.run("reconcile tight.json oom.txt --format json");
    assert_eq!(document.exit, Some(0), "{}", document.stderr);
    let document = document.json();
    assert_eq!(document["evidence"]["unexplained_bytes"], 0);
    assert_eq!(document["evidence"]["request"]["predicted_bytes"], oom["device_request_bytes"]);
    assert!(document["evidence"]["device_free_bytes"].as_i64().unwrap() > 0);

    // Of a plan for another card: what it has in place before the objects that ask for as much.
    let wide = planned(&folder, "wide.json", "");
    let answer = folder.run(&format!("reconcile {wide} oom.txt --format json"));
    assert_eq!(answer.exit, Some(0), "{}", answer.stderr);
    let document = answer.json();
    assert_eq!(document["evidence"]["mismatches"][0]["what"], "bytes of the card");
    assert_eq!(document["at"]["phase"], oom["phase"]);
    assert!(!document["evidence"]["request"]["objects"].as_array().unwrap().is_empty());

    // Of a plan with half the batch, which fits.
    let half =
        folder.run(&format!("plan gpt2 {capacity} {} -o half.json", SETUP.replace("--batch 4", "--batch 2")));
    assert_eq!(half.exit, Some(0), "{}", half.stderr);
    let document = folder.run("reconcile half.json oom.txt --format json").json();
    assert_eq!(document["evidence"]["setting"]["setting"], "--batch 4");
}

#[test]
fn the_setting_of_a_job_whose_ranks_divide_the_work_is_named_too() {
    let config = r#"{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 512}"#;
    let folder = Folder::new().with("config.json", config);
    for parallel in ["ddp", "fsdp2", "zero2"] {
        for (file, batch) in [("plan.json", 4), ("found.json", 2)] {
            let line = format!(
                "plan config.json --seq 128 --dtype bf16 --parallel {parallel} --world-size 8 --rank 1 --batch {batch} \
                 --format json -o {file}"
            );
            let answer = folder.run(&line);
            assert_eq!(answer.exit, Some(0), "{}", answer.stderr);
        }
        let document = folder.run("reconcile plan.json found.json --format json").json();
        assert_eq!(document["evidence"]["setting"]["setting"], "--batch 2", "{parallel}");
        assert_eq!(document["evidence"]["setting"]["difference_bytes"], 0, "{parallel}");
    }
}
