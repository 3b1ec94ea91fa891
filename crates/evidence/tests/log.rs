//! Step logs of every form become series.

use evidence::series::Figure;
use evidence::{LogError, StepLog};

/// The log of a run whose reserved memory grows: cycles, MiB allocated, MiB reserved.
const CYCLES: [(u64, u64, u64); 6] =
    [(0, 66, 220), (20, 106, 2980), (40, 146, 5760), (60, 186, 8520), (80, 226, 11300), (100, 266, 14060)];

fn written(row: impl Fn(u64, u64, u64) -> String) -> String {
    CYCLES.iter().map(|(cycle, allocated, reserved)| row(*cycle, *allocated, *reserved) + "\n").collect()
}

#[test]
fn one_log_in_every_form() {
    let forms = [
        "cycle,allocated_mib,reserved_mib\n".to_owned() + &written(|c, a, r| format!("{c},{a},{r}")),
        "cycle\tallocated\treserved\n".to_owned() + &written(|c, a, r| format!("{c}\t{a} MiB\t{r} MiB")),
        "step;memory_allocated;memory_reserved\n".to_owned()
            + &written(|c, a, r| format!("{c};{};{}", a << 20, r << 20)),
        "step,allocated,reserved\n".to_owned() + &written(|c, a, r| format!("{c},{a},{r}")),
        written(|c, a, r| {
            format!(
                r#"{{"step": {c}, "cuda/allocated_gib": {}, "cuda/reserved_gib": {}}}"#,
                a as f64 / 1024.0,
                r as f64 / 1024.0
            )
        }),
        written(|c, a, r| {
            format!(r#"INFO {{"iteration": {c}, "memory": {{"allocated_mb": {a}, "reserved_mb": {r}}}}}"#)
        }),
        written(|c, a, r| {
            format!("2025-01-01 00:00:00 [rank0] step {c} | allocated={a} MiB | reserved: {r} MiB, loss 1.5")
        }),
        written(|c, a, r| format!("{{'step': {c}, 'allocated_mib': {a}, 'reserved_mib': {r}.0}}")),
    ];
    for form in forms {
        let log = StepLog::read(&form).unwrap();
        assert_eq!(log.series.len(), 1, "{form}");
        let series = &log.series[0];
        let of =
            |figure| series.column(figure).map(|(step, bytes)| (step, bytes.get() >> 20)).collect::<Vec<_>>();
        assert_eq!(of(Figure::Allocated), CYCLES.map(|row| (row.0, row.1)), "{form}");
        assert_eq!(of(Figure::Reserved), CYCLES.map(|row| (row.0, row.2)), "{form}");
    }
}

#[test]
fn units_that_are_not_said_are_told_of() {
    let told = |text: &str| {
        let log = StepLog::read(text).unwrap();
        log.warnings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    assert!(told("step,allocated\n1,700\n").contains("taken for MiB"));
    assert!(told("step,allocated\n1,7.25\n").contains("taken for GiB"));
    assert!(told("step,allocated\n1,73400320\n").contains("taken for bytes"));
    assert!(told("step,mem_MB\n1,700\n").contains("in MB"));
    assert!(told("step,mem_MB\n1,700\n").contains("does not say which memory"));
    assert_eq!(told("step,allocated_mib\n1,700\n"), "");
    assert!(told("allocated_mib,loss\n700,1\n").contains("counted from 0"));
    assert!(told("step,allocated_mib\n7,700\n1,700\n").contains("go back"));
}

#[test]
fn ranks_and_other_columns_are_kept_apart() {
    let text = "rank,step,seq_len,reserved_bytes,loss\n0,1,128,512,\n1,1,256,1024,2.5\n0,2,64,512,\n";
    let log = StepLog::read(text).unwrap();
    let shape: Vec<_> = log.series.iter().map(|series| (series.of.as_deref(), series.points.len())).collect();
    assert_eq!(shape, [(Some("0"), 2), (Some("1"), 1)]);
    assert_eq!(log.series[0].extras[0].name, "seq_len");
    assert_eq!(log.series[0].extras[0].values, [Some(128.0), Some(64.0)]);
    assert_eq!(log.series[0].extras.len(), 1);
    assert_eq!(log.series[1].extras[1].values, [Some(2.5)]);
    assert_eq!(log.series[0].points[0].allocated, None);
}

#[test]
fn a_log_without_memory_says_what_it_has() {
    let told = StepLog::read("{\"step\": 1, \"loss\": 2.5}\n").unwrap_err();
    assert_eq!(told, LogError::NoRows);
    assert_eq!(StepLog::read("epoch one\n"), Err(LogError::NoRows));
    let told = StepLog::of_records(br#"[{"step": 1, "loss": 2.5}]"#).unwrap_err();
    assert!(told.to_string().ends_with("the columns are `loss`, `step`"), "{told}");
}

#[test]
fn a_list_of_records_is_read_record_by_record() {
    let records = r#"[{"step": 1, "allocated_mib": 5}, 7, [{}], {"step": 2, "inner": {"reserved_mib": 9}}]"#;
    let kept = format!(r#"{{"best": {{"log_history": 1}}, "log_history": {records}, "epoch": 3}}"#);
    for json in [records.to_owned(), kept, format!("\u{feff}{records}")] {
        let log = StepLog::of_records(json.as_bytes()).unwrap();
        assert_eq!(log.series[0].points.len(), 2, "{json}");
        assert_eq!(log.columns.len(), 2);
        assert!(log.warnings.iter().any(|warning| warning.to_string().contains('2')), "two are no records");
    }
    for damaged in ["[{\"step\": 1", "[{}] x", "{\"log_history\": 3}", "{\"a\": []}", &"[".repeat(100_000)] {
        assert!(
            matches!(StepLog::of_records(damaged.as_bytes()), Err(LogError::Records { .. })),
            "{damaged:.20}"
        );
    }
}

#[test]
fn a_log_of_more_cells_than_are_held_is_refused() {
    // Each row has one cell more than the one before, and its own name.
    let wide: String = (0..4096).map(|column| format!("{{\"c{column}\": 1}}\n")).collect();
    let log = format!("{{\"step\": 1, \"allocated_mib\": 2}}\n{}", wide.repeat(3));
    assert_eq!(StepLog::read(&log), Err(LogError::TooLarge));
}
