//! Arguments, streams, files and exit codes.

use std::io::Read as _;
use std::process::Stdio;

use crate::run::{Folder, run};

#[test]
fn an_unknown_gpu_gets_a_hint_and_quiet_takes_it_away() {
    insta::assert_snapshot!(run("budget --gpu H100").all(), @r"
    exit 2
    --- stderr
    error: no GPU of the catalogue is called `H100`
    hint: did you mean `H100-80GB` or `H100-PCIe` or `H200`? `vramledger gpus` lists them
    ");
    insta::assert_snapshot!(run("budget --gpu H100 --quiet").all(), @r"
    exit 2
    --- stderr
    error: no GPU of the catalogue is called `H100`
    ");
}

#[test]
fn what_clap_refuses_is_a_question_that_cannot_be_answered() {
    assert_eq!(run("").exit, Some(2));
    assert_eq!(run("frob").exit, Some(2));
    insta::assert_snapshot!(run("plan gpt2 --batch -3").all(), @r"
    exit 2
    --- stderr
    error: invalid value '-3' for '--batch <N>': it must be a whole number of at least 1

    For more information, try '--help'.
    ");
    let help = run("--help");
    assert_eq!((help.exit, help.stderr.as_str()), (Some(0), ""));
    assert_eq!(run("--version").exit, Some(0));
}

#[test]
fn a_missing_file_is_told_with_its_cause() {
    insta::assert_snapshot!(run("compare a.json b.json").all(), @r"
    exit 2
    --- stderr
    error: failed to read `a.json`
    caused by: No such file or directory (os error 2)
    ");
}

#[test]
fn output_files_are_whole_or_not_there() {
    let folder = Folder::new().with("old.txt", "old");
    let answer = folder.run("gpus --format csv -o old.txt");
    assert_eq!((answer.exit, answer.stdout.as_str(), answer.stderr.as_str()), (Some(0), "", ""));
    let written = std::fs::read_to_string(folder.path().join("old.txt")).unwrap();
    assert_eq!(written, folder.run("gpus --format csv").stdout);
    // A question that cannot be answered leaves what was there, and nothing else.
    assert_eq!(folder.run("budget --gpu nix -o old.txt").exit, Some(2));
    assert_eq!(std::fs::read_to_string(folder.path().join("old.txt")).unwrap(), written);
    assert_eq!(folder.run("gpus -o nowhere/new.txt").exit, Some(2));
    assert_eq!(folder.files(), ["old.txt"]);
}

#[test]
fn text_in_a_file_has_no_colours_unless_they_are_asked_for() {
    let folder = Folder::new();
    let file = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    folder.run("checkpoint-plan --layers 16 -o plain.txt");
    folder.run("checkpoint-plan --layers 16 --color always -o colour.txt");
    assert!(!file("plain.txt").contains('\u{1b}'));
    assert!(file("colour.txt").contains('\u{1b}'));
    assert!(run("checkpoint-plan --layers 16 --color always").stdout.contains('\u{1b}'));
    assert!(!run("checkpoint-plan --layers 16").stdout.contains('\u{1b}'));
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let folder = Folder::new();
    let mut child = folder
        .command("plan gpt2 --seqs 16,32,48,64 --steps 200 --format json")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 1];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut first).unwrap();
    drop(stdout);
    let ended = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&ended.stderr), "");
    assert_eq!(ended.status.code(), Some(0));
}

#[test]
fn standard_input_is_a_file_like_another() {
    let folder = Folder::new();
    let states = r#"[{"name": "p", "category": "parameter", "size_mb": 20, "start_phase": "load",
        "end_phase": "update", "device": "gpu", "persistent": true}]"#;
    let answer = folder
        .run_with("reconcile - --allocated 1 --reserved 1 --capacity 1GiB --format csv", states.as_bytes());
    insta::assert_snapshot!(answer.all(), @r"
    exit 0
    --- stdout
    name,category,predicted_bytes,found_bytes,difference_bytes,reason
    allocated,,20971520,1,-20971519,
    reserved,,,1,0,
    capacity,,,1073741824,1073741823,
    p,parameter,20971520,,,
    unattributed,unattributed,,,-20971519,
    ");
    let config = br#"{"model_type": "gpt2", "n_layer": 1}"#;
    let answer = folder.run_with("plan - --seq 16 --format json", config);
    assert_eq!(answer.json()["subject"]["model"]["name"], "stdin");
}
