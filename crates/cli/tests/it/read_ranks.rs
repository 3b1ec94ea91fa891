//! `read` of several files: the ranks of a job.

use crate::run::Folder;

/// The states of a rank, in MiB: parameters of these names, an activation, and what it keeps besides.
fn states(parameters: &[(&str, u32)], activation: u32, kept: u32) -> String {
    let state = |name: &str, category: &str, size: u32, phases: [&str; 2], persistent: bool| {
        format!(
            r#"{{"name": "{name}", "category": "{category}", "size_mb": {size}, "start_phase": "{}",
            "end_phase": "{}", "device": "gpu", "persistent": {persistent}}}"#,
            phases[0], phases[1]
        )
    };
    let mut states: Vec<String> = parameters
        .iter()
        .map(|(name, size)| state(name, "parameter", *size, ["load", "zero_grad"], true))
        .collect();
    states.push(state("hidden", "activation", activation, ["forward", "backward"], false));
    if kept > 0 {
        states.push(state("logits", "activation", kept, ["forward", "zero_grad"], false));
    }
    format!("[{}]", states.join(","))
}

/// Eight ranks of two stages, of which the tenth keeps logits.
fn pipeline() -> Folder {
    let first = || states(&[("embedding", 64), ("layers", 100)], 40, 0);
    let last = |kept| states(&[("layers", 100), ("head", 90)], 20, kept);
    let folder = (0..4).fold(Folder::new(), |folder, rank| folder.with(&format!("rank{rank}.json"), first()));
    let folder = (8..11).fold(folder, |folder, rank| folder.with(&format!("rank{rank}.json"), last(0)));
    folder.with("rank11.json", last(30))
}

const EIGHT: &str =
    "rank0.json rank1.json rank10.json rank11.json rank2.json rank3.json rank8.json rank9.json";

#[test]
fn stages_and_the_rank_that_keeps_more() {
    let folder = pipeline();
    insta::assert_snapshot!(folder.run(&format!("read {EIGHT}")).all(), @r"
    exit 0
    --- stdout
    8 ranks in 2 stages: peaks from 204.00 MiB to 240.00 MiB allocated; rank11 is unlike the others,
    +30.00 MiB

    Stages, told apart by their parameters; peaks, MiB
    stage  ranks  count   parameters  median   least    most  alike within
        0  0-3        4  164.00 in 2  204.00  204.00  204.00          0.05
        1  8-11       4  190.00 in 2  210.00  210.00  240.00          0.05

    rank11 holds 30.00 MiB more at its peak than rank9, the median of its stage.

    What makes rank11 unlike rank9, MiB
    object  category    rank9  rank11  difference
    logits  activation      0   30.00      +30.00
    all                                    +30.00

    Ranks, each at its own peak, MiB
    rank    stage  allocated  to median  in               at the end
    rank0       0     204.00          0  step 1, forward           0
    rank1       0     204.00          0  step 1, forward           0
    rank2       0     204.00          0  step 1, forward           0
    rank3       0     204.00          0  step 1, forward           0
    rank8       1     210.00          0  step 1, forward           0
    rank9       1     210.00          0  step 1, forward           0
    rank10      1     210.00          0  step 1, forward           0
    rank11      1     240.00   +30.00 !  step 1, forward           0

    How to read this
      - each rank is told at its own peak: the peaks of two ranks are different instants, and their
        difference is not what one holds more at any one moment
    ");
    let json = folder.run(&format!("read {EIGHT} --format json")).json();
    assert_eq!(json["format"], "vramledger-read-ranks/1");
    assert_eq!(json["stages"][1]["ranks"].as_array().unwrap().len(), 4);
    assert_eq!(json["ranks"][7]["rank"], 11);
    let outlier = &json["outliers"][0];
    let rows = outlier["differences"].as_array().unwrap();
    let sum: i64 = rows.iter().map(|row| row["difference_bytes"].as_i64().unwrap()).sum();
    assert_eq!((sum, rows.len()), (30 << 20, 1));
    assert_eq!(outlier["difference_bytes"], 30 << 20);
    let sheet = folder.run(&format!("read {EIGHT} --format csv")).stdout;
    assert_eq!(sheet.lines().count(), 10);
    assert!(sheet.ends_with("difference,rank11,,,allocated,31457280,,,,31457280,,,,,,logits,activation\n"));
}

#[test]
fn a_smaller_shard_is_nothing_odd() {
    let rank = |layers, activation| states(&[("layers", layers)], activation, 0);
    let folder = Folder::new()
        .with("r0.json", rank(100, 40))
        .with("r1.json", rank(100, 40))
        .with("r2.json", rank(100, 40))
        .with("r3.json", rank(97, 40))
        .with("r4.json", rank(97, 50));
    let json = folder.run("read r0.json r1.json r2.json r3.json --format json").json();
    assert_eq!(json["ranks"][3]["difference_bytes"], -3 << 20);
    assert_eq!(
        (json["ranks"][3]["outlier"].as_bool(), json["stages"].as_array().unwrap().len()),
        (Some(false), 1)
    );
    let json = folder.run("read r0.json r1.json r2.json r4.json --format json").json();
    assert_eq!(json["outliers"][0]["difference_bytes"], 7 << 20);
}

#[test]
fn what_cannot_be_read_is_told_and_the_rest_is_answered() {
    let folder = pipeline().with("rank12.pickle", b"\x80\x04\x95").with("rank13.json", "step,loss\n1,2\n");
    let answer = folder.run(&format!("read {EIGHT} rank12.pickle rank13.json rank14.pickle --format json"));
    let json = answer.json();
    assert_eq!(json["ranks"].as_array().unwrap().len(), 8);
    assert_eq!(json["unread"].as_array().unwrap().len(), 3);
    assert_eq!(answer.stderr.matches("warning: ").count(), 3, "{}", answer.stderr);
    assert!(answer.stderr.contains("failed to read `rank14.pickle`: No such file"), "{}", answer.stderr);
    let nothing = folder.run("read rank12.pickle rank13.json");
    assert!(nothing.sentence().starts_with("not one of the files can be read; the first: "));
}

#[test]
fn questions_about_one_file_and_doubled_names_are_refused() {
    let folder = pipeline();
    let sentence = |line: &str| folder.run(line).sentence().to_owned();
    assert_eq!(
        sentence("read rank0.json rank1.json --step 2"),
        "`--step` looks into one file, and these are 2"
    );
    assert_eq!(
        sentence("read rank0.json a=rank1.json a=rank2.json"),
        "two files are called `a`; name one of them as `NAME=FILE`"
    );
}

#[test]
fn a_rank_is_whatever_has_a_ledger() {
    let folder = pipeline();
    for command in
        ["plan mlp:2x64 --batch 4 -o plan.vlt --quiet", "plan mlp:2x64 --batch 4 --format json -o plan.json"]
    {
        assert_ne!(folder.run(command).exit, Some(2));
    }
    let json = folder.run("read a=plan.json b=plan.json c=rank0.json --format json").json();
    assert_eq!(json["stages"].as_array().unwrap().len(), 2);
    assert_eq!(json["ranks"][0]["peak_bytes"], json["ranks"][1]["peak_bytes"]);
    assert_eq!(json["outliers"].as_array().unwrap().len(), 0);
    // A tape of a plan tells what was asked for, and no blocks.
    let json = folder.run("read a=plan.vlt b=plan.json c=rank0.json --format json").json();
    assert_eq!(json["measure"], "allocated");
    assert_eq!(json["ranks"].as_array().unwrap().len(), 2);
    let reason = "`a` does not tell the allocated bytes, in which the others are compared";
    assert_eq!(json["unread"][0]["reason"], reason);
}
