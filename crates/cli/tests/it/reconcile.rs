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
