//! `simulate`: one tape under several settings of the allocator.

use serde_json::{Value, json};

use crate::run::{Answer, Folder};

/// A folder with the tape of a small run.
fn taped() -> Folder {
    let folder = Folder::new();
    let plan = folder.run("plan mlp:4x1024 --batch 8192 --capacity 1200MiB -o run.vlt --format csv");
    assert_eq!(plan.exit, Some(0), "{}", plan.stderr);
    folder
}

fn settings(answer: &Answer) -> Vec<Value> {
    answer.json()["settings"].as_array().unwrap().clone()
}

#[test]
fn the_defaults_and_expandable_segments_are_side_by_side() {
    insta::assert_snapshot!(taped().run("simulate run.vlt").all(), @r"
    exit 0
    --- stdout
    run fits with each of the settings
    H100-80GB of 1200.00 MiB, 550.00 MiB for the CUDA context (differs by card, driver and loaded
    kernels); equal blocks are chosen as torch 2.15 does

    The peaks of the tape, MiB; stranded is what of the reserved peak was in no block in use
    settings                  allocated  reserved  stranded  retries  headroom  fits
    (the defaults)               336.00    374.00     38.00        0   +276.00  yes
    expandable_segments:True     336.00    342.00      6.00        0   +308.00  yes

    Assumed
      - cuBLAS workspace of the default size for the card, allocated around each product and freed
        (torch 2.15)

    Not in these figures
      - one process on one device: no other process, no NCCL, no data loader on the GPU
      - the requests are those of the tape: on another card or release of torch a run may ask for other
        workspaces and run other kernels
    ");
}

#[test]
fn a_run_that_fits_with_some_of_the_settings() {
    let folder = taped();
    let line = "simulate run.vlt --capacity 915MiB --alloc-conf max_split_size_mb:20 --alloc-conf expandable_segments:True";
    insta::assert_snapshot!(folder.run(line).all(), @r"
    exit 0
    --- stdout
    run fits with some of the settings
    H100-80GB of 915.00 MiB, 550.00 MiB for the CUDA context (differs by card, driver and loaded
    kernels); equal blocks are chosen as torch 2.15 does

    The peaks of the tape, MiB; stranded is what of the reserved peak was in no block in use
    settings                  allocated  reserved  stranded  retries  headroom  fits
    max_split_size_mb:20         304.00    350.00    274.00        1     -5.00  no
    expandable_segments:True     336.00    342.00      6.00        0    +23.00  yes

    Out of memory
      - max_split_size_mb:20: backward of step 2 asks for 32.00 MiB for loss.pow_backward (event 142),
        for which the allocator tries to take 32.00 MiB of the card: 5.00 MiB more than is left; 338.00
        MiB are reserved, and the largest free block of its kind has 16.00 MiB

    Assumed
      - cuBLAS workspace of the default size for the card, allocated around each product and freed
        (torch 2.15)

    Not in these figures
      - one process on one device: no other process, no NCCL, no data loader on the GPU
      - the requests are those of the tape: on another card or release of torch a run may ask for other
        workspaces and run other kernels
    ");
    insta::assert_snapshot!(folder.run(&format!("{line} --format csv")).all(), @r"
    exit 0
    --- stdout
    alloc_conf,device,fits,peak_allocated_bytes,peak_reserved_bytes,stranded_at_peak_bytes,retries,headroom_bytes,oom_event,oom_step,oom_phase,oom_object,oom_requested_bytes
    max_split_size_mb:20,0,false,318768128,367001600,287309312,1,-5242880,142,2,backward,loss.pow_backward,33554432
    expandable_segments:True,0,true,352322560,358612992,6290432,0,24117248,,,,,
    ");
    let markdown = folder.run(&format!("{line} --format markdown")).stdout;
    assert!(markdown.starts_with("**run fits with some of the settings**\n"), "{markdown}");
    assert!(
        markdown.contains("\n| expandable_segments:True | 336.00 | 342.00 | 6.00 | 0 | +23.00 | yes |\n")
    );
}

#[test]
fn the_defaults_are_what_plan_says() {
    let folder = Folder::new();
    let plan = folder.run("plan gpt2 --seq 64 -o run.vlt --format json").json();
    let answer = folder.run("simulate run.vlt --alloc-conf= --format json");
    let document = answer.json();
    assert_eq!(document["format"], "vramledger-simulate/1");
    assert_eq!((&document["name"], &document["torch"]), (&json!("run"), &json!("2.15")));
    for key in ["subject", "devices", "outside", "provenance"] {
        assert_eq!(document[key], plan[key], "{key}");
    }
    let row = &document["settings"][0];
    assert_eq!((&row["alloc_conf"], &row["fits"], &row["oom"]), (&json!(""), &json!(true), &Value::Null));
    let device = &row["devices"][0];
    assert_eq!(device["peak_allocated_bytes"], plan["peaks"]["allocated"]["bytes"]);
    assert_eq!(device["peak_reserved_bytes"], plan["peaks"]["reserved"]["bytes"]);
    assert_eq!(device["headroom_bytes"], plan["headroom_bytes"]);
    assert_eq!(device["memory_stats"]["reserved_bytes.all.peak"], device["peak_reserved_bytes"]);
}

#[test]
fn a_failure_is_the_one_that_plan_tells() {
    let folder = Folder::new();
    let plan = folder.run("plan gpt2 --seq 256 --capacity 2GiB -o run.vlt --format json").json();
    let answer = folder.run("simulate run.vlt --format json");
    assert_eq!(answer.exit, Some(0), "a simulation is no question of yes and no");
    assert_eq!(settings(&answer)[0]["oom"], plan["oom"]);
    assert_eq!(settings(&answer)[0]["devices"][0]["headroom_bytes"], plan["headroom_bytes"]);
    // The same requests on a larger card.
    let larger = folder.run("simulate run.vlt --gpu A100-80GB --format json");
    assert!(settings(&larger).iter().all(|row| row["fits"] == true));
    assert_eq!(larger.json()["devices"][0]["name"], "A100-80GB");
    assert_eq!(
        folder.run("simulate run.vlt --capacity 3GiB --format json").json()["devices"][0]["capacity_bytes"],
        3_u64 << 30
    );
}

#[test]
fn unknown_settings_are_warned_of_and_bad_ones_refused() {
    let folder = taped();
    let answer = folder.run("simulate run.vlt --alloc-conf nonsense:1 --format json");
    let warning = "`nonsense:1`: Unrecognized key 'nonsense' in Accelerator allocator config.";
    assert_eq!(answer.json()["warnings"], json!([warning]));
    assert_eq!(answer.stderr, format!("warning: {warning}\n"));
    let refused = folder.run("simulate run.vlt --alloc-conf max_split_size_mb:1");
    assert_eq!(
        refused.sentence(),
        "the allocator settings `max_split_size_mb:1`: CachingAllocator option max_split_size_mb too small, must be >= 20"
    );
    assert_eq!(refused.stderr.lines().count(), 1);
    assert!(
        folder
            .run("simulate run.vlt --capacity 1GiB --context 1GiB")
            .sentence()
            .starts_with("`--context` must be")
    );
    assert!(folder.run("simulate =run.vlt").sentence().contains("empty name"));
}

#[test]
fn what_is_no_tape_of_requests_is_told() {
    let states = r#"[{"name": "p", "category": "parameter", "size_mb": 20, "start_phase": "load",
        "end_phase": "update", "device": "gpu", "persistent": true}]"#;
    let folder = taped().with("states.json", states);
    let ledger = folder.run("plan mlp:2x64 -o other.vlt --format json").stdout;
    let folder = folder.with("ledger.json", ledger);
    insta::assert_snapshot!(folder.run("simulate states.json").all(), @r"
    exit 2
    --- stderr
    error: `states.json` holds hand-written states, whose sizes are blocks and not requests: a tape is needed
    hint: `vramledger plan MODEL -o run.vlt` keeps one
    ");
    insta::assert_snapshot!(folder.run("simulate ledger.json").all(), @r"
    exit 2
    --- stderr
    error: `ledger.json` is a ledger, which has totals and no requests: a tape is needed
    hint: it was made from the tape `other.vlt`
    ");
}

#[test]
fn the_tie_rule_follows_the_release_of_the_tape() {
    let folder = Folder::new();
    folder.run("plan gpt2 --seq 64 --torch 2.6 -o old.vlt --format csv");
    let torch =
        |flags: &str| folder.run(&format!("simulate old.vlt {flags} --format json")).json()["torch"].clone();
    assert_eq!((torch(""), torch("--torch 2.15")), (json!("2.6"), json!("2.15")));
}
