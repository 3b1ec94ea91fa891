//! One plan under other settings, and the largest value that fits.

use serde_json::{Value, json};

use crate::run::{Answer, run};

const MLP: &str = "plan mlp:8x1024 --capacity 900MiB --optimizer adamw";

fn rows(answer: &Answer) -> Vec<Value> {
    answer.json()["rows"].as_array().unwrap().clone()
}

#[test]
fn each_combination_is_a_row_and_its_savings_sum() {
    let line = format!("{MLP} --format json --vary batch=256,4096 --vary optimizer-impl=foreach,fused");
    let rows = rows(&run(&line));
    assert_eq!(rows.len(), 4);
    let batch = |row: &Value| row["settings"][0]["value"].clone();
    assert_eq!(rows.iter().map(batch).collect::<Vec<_>>(), ["256", "256", "4096", "4096"]);
    assert_eq!(rows[0]["outcome"]["saving_bytes"], 0);
    for row in &rows {
        let outcome = &row["outcome"];
        let by_category = outcome["saving_by_category"].as_object().unwrap();
        let sum: i64 = by_category.values().map(|saving| saving.as_i64().unwrap()).sum();
        assert_eq!(outcome["saving_bytes"], sum);
        let first = rows[0]["outcome"]["peak"]["bytes"].as_i64().unwrap();
        assert_eq!(first - outcome["peak"]["bytes"].as_i64().unwrap(), sum);
    }
    assert_eq!(rows[3]["outcome"]["unchanged"], json!(["parameter"]));
}

#[test]
fn a_combination_that_contradicts_itself_is_told_and_the_others_stand() {
    let line =
        format!("{MLP} --batch 16 --format json --vary optimizer=sgd,adamw --vary nesterov=false,true");
    let rows = rows(&run(&line));
    let refused: Vec<bool> = rows.iter().map(|row| row["outcome"].is_null()).collect();
    assert_eq!(refused, [false, true, false, true]);
    assert!(rows[1]["refused"].as_str().unwrap().contains("--nesterov"), "{}", rows[1]["refused"]);
}

#[test]
fn recomputation_that_lowers_no_peak_is_explained() {
    let line = "plan llama-3.2-1b --dtype bf16 --seq 128 --steps 2 --format json --vary checkpoint=none,full";
    let rows = rows(&run(line));
    assert_eq!(rows[0]["outcome"]["no_gain"], Value::Null);
    assert_eq!(
        rows[1]["outcome"]["no_gain"],
        "more is computed again than with checkpoint=none, and the peak is no lower: it lies in update, where most is optimizer_state, which that does not make smaller"
    );
    assert!(rows[1]["outcome"]["costs"]["flops"]["recompute"].as_u64().unwrap() > 0);
}

#[test]
fn the_largest_batch_fits_and_the_next_does_not() {
    let found = run(&format!("{MLP} --format json --largest batch")).json();
    let largest = found["value"].as_u64().unwrap();
    for (batch, exit) in [(largest, Some(0)), (largest + 1, Some(1))] {
        assert_eq!(run(&format!("{MLP} --format json --batch {batch}")).exit, exit, "{batch}");
    }
    let none = run("plan mlp:8x1024 --capacity 600MiB --format json --largest batch");
    assert_eq!((none.exit, &none.json()["value"]), (Some(1), &Value::Null));
}

#[test]
fn what_cannot_be_varied_is_refused_with_a_sentence() {
    let refusal = |rest: &str| {
        let answer = run(&format!("plan mlp:2x16 {rest}"));
        assert_eq!(answer.exit, Some(2), "{rest}");
        answer.stderr.lines().next().unwrap().to_owned()
    };
    assert_eq!(
        refusal("--vary batch"),
        "error: `--vary batch` must be KEY=VALUE,… as in `--vary checkpoint=none,full`"
    );
    assert!(
        refusal("--vary btach=1,2")
            .starts_with("error: `btach` of `--vary` is an unknown key; the keys are ")
    );
    assert!(refusal("--vary batch=1,two").contains("two"));
    assert_eq!(
        refusal("--vary batch=1,2 --vary batch=3"),
        "error: `--vary` has `batch` twice: give all its values at once"
    );
    assert_eq!(
        refusal("--largest seq"),
        "error: an mlp has no sequence: `--largest seq` needs a model of text"
    );
    assert_eq!(
        refusal("--largest batch -o run.vlt"),
        "error: `-o FILE.vlt` keeps the tape of one plan, and `--largest` runs several: leave one of them out"
    );
}
