//! Summaries, `nvidia-smi`, timelines, and what a file is.

use evidence::recognise::{Form, TextForm, recognise, text, text_form};
use evidence::series::Figure;
use evidence::smi::smi;
use evidence::summary::summaries;
use evidence::{RawTimeline, Source, Timeline};
use ledger::{Bytes, Measure};

const SUMMARY: &str = "\
|===========================================================================|
|                  PyTorch CUDA memory summary, device ID 0                 |
|---------------------------------------------------------------------------|
|            CUDA OOMs: 1            |        cudaMalloc retries: 2         |
|===========================================================================|
|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
|---------------------------------------------------------------------------|
| Allocated memory      | 122368 B   |  32941 KiB | 402131 KiB | 402011 KiB |
|       from large pool |      0 B   |  32768 KiB | 393216 KiB | 393216 KiB |
|---------------------------------------------------------------------------|
| Active memory         | 122368 B   |  32941 KiB | 402131 KiB | 402011 KiB |
| Requested memory      | 120420 B   |  32938 KiB | 402121 KiB | 402004 KiB |
| GPU reserved memory   |  34816 KiB |  34816 KiB |  34816 KiB |      0 B   |
| Non-releasable memory |   1928 KiB |   2016 KiB |  10811 KiB |   8883 KiB |
|===========================================================================|
";

#[test]
fn a_summary_in_a_log_is_an_instant() {
    let log: String = SUMMARY.lines().map(|line| format!("[rank0]: {line}\n")).collect();
    for text in [SUMMARY, &log] {
        let found = summaries(text);
        assert_eq!(found.len(), 1);
        let at = &found[0];
        assert_eq!((at.source, at.device), (Source::Summary, Some(0)));
        assert_eq!((at.out_of_memory, at.retries), (Some(1), Some(2)));
        assert_eq!((at.allocated, at.held), (Some(Bytes::new(122_368)), Some(Bytes::new(120_420))));
        assert_eq!(at.peak_allocated, Some(Bytes::new(32_941 << 10)));
        assert_eq!(at.reserved, Some(Bytes::new(34_816 << 10)));
        assert_eq!(at.unallocated, Some(Bytes::new((34_816 << 10) - 122_368)));
        assert_eq!(at.inactive_split, Some(Bytes::new(1928 << 10)));
        assert_eq!(at.unit, Some(Bytes::new(1 << 10)));
    }
    assert_eq!(summaries(&SUMMARY.repeat(3)).len(), 3);
}

#[test]
fn statistics_in_every_print() {
    let prints = [
        "OrderedDict([('allocated_bytes.all.current', 7), ('allocated_bytes.all.peak', 9), ('num_ooms', 0), ('reserved_bytes.all.current', 20)])",
        "{'allocated_bytes.all.current': 7, 'allocated_bytes.all.peak': 9, 'num_ooms': 0, 'reserved_bytes.all.current': 20}",
        "{\"allocated_bytes.all.current\": 7,\n \"allocated_bytes.all.peak\": 9, \"num_ooms\": 0, \"reserved_bytes.all.current\": 20}",
        "INFO allocated_bytes.all.current = 7\nINFO allocated_bytes.all.peak = 9\nINFO num_ooms = 0\nINFO reserved_bytes.all.current = 20\n",
    ];
    for print in prints {
        let found = summaries(print);
        assert_eq!(found.len(), 1, "{print}");
        let at = &found[0];
        assert_eq!(at.allocated.zip(at.reserved), Some((Bytes::new(7), Bytes::new(20))), "{print}");
        assert_eq!((at.peak_allocated, at.out_of_memory), (Some(Bytes::new(9)), Some(0)), "{print}");
        assert_eq!(summaries(&format!("{print}\n{print}")).len(), 2, "{print}");
    }
}

#[test]
fn queries_of_cards() {
    let query = "index, name, memory.used [MiB], memory.total [MiB], utilization.gpu [%]\n\
                 0, NVIDIA H100 80GB HBM3, 1024 MiB, 81559 MiB, 5 %\n\
                 1, NVIDIA H100 80GB HBM3, 2048 MiB, 81559 MiB, 7 %\n";
    let bare: String = query.lines().skip(1).map(|line| line.to_owned() + "\r\n").collect();
    for text in [query.to_owned(), bare, query.replace(" MiB,", ",").replace(" MiB\n", "\n")] {
        let found = smi(&text).unwrap();
        let of = |at: &evidence::Instant| {
            (at.device, at.used.map(|b| b.get() >> 20), at.capacity.map(|b| b.get() >> 20))
        };
        let cards: Vec<_> = found.instants.iter().map(of).collect();
        assert_eq!(cards, [(Some(0), Some(1024), Some(81559)), (Some(1), Some(2048), Some(81559))], "{text}");
        assert_eq!(found.instants[0].device_name.as_deref(), Some("NVIDIA H100 80GB HBM3"));
    }
    let over_time = "timestamp, index, memory.used [MiB]\n2025/01/01 10:00:00.1, 0, 5 MiB\n\
                     2025/01/01 10:00:00.1, 1, 6 MiB\n2025/01/01 10:00:01.1, 0, 9 MiB\n2025/01/01 10:00:01.1, 1, 6 MiB\n";
    let found = smi(over_time).unwrap();
    let used: Vec<_> =
        found.series[0].column(Figure::Used).map(|(step, bytes)| (step, bytes.get() >> 20)).collect();
    assert_eq!((found.series.len(), used), (2, vec![(0, 5), (1, 9)]));
    for other in ["a,b\n1,2\n", "step,allocated_mib\n1,2\n", "", "x MiB"] {
        assert_eq!(smi(other), None, "{other}");
    }
}

#[test]
fn queries_of_processes_and_the_table_itself() {
    let query =
        "pid, process_name, used_gpu_memory [MiB]\n77, python3, 512 MiB\n78, /usr/bin/python, [N/A]\n";
    for text in [query, "77, python3, 512 MiB\n78, /usr/bin/python, [N/A]\n"] {
        let found = smi(text).unwrap();
        let processes: Vec<_> =
            found.instants[0].processes.iter().map(|p| (p.pid, p.bytes.map(Bytes::get))).collect();
        assert_eq!(processes, [(77, Some(512 << 20)), (78, None)], "{text}");
    }
    let table = "\
| NVIDIA-SMI 535.54.03    Driver Version: 535.54.03    CUDA Version: 12.2 |
|   0  NVIDIA A100-SXM4-40GB          On  | 00000000:00:04.0 Off |  0 |
| N/A   34C    P0    57W / 400W |   1234MiB / 40960MiB |      0%      Default |
|   1  Tesla T4   Off | 00000000:00:05.0 Off |  0 |
| N/A   34C    P0    57W /  70W |      0MiB / 15360MiB |      0%      Default |
| Processes: |
|    0   N/A  N/A     4321      C   python3      1224MiB |
";
    let found = smi(table).unwrap().instants;
    assert_eq!(found.len(), 2);
    assert_eq!(found[0].device_name.as_deref(), Some("NVIDIA A100-SXM4-40GB"));
    assert_eq!((found[0].device, found[0].used), (Some(0), Some(Bytes::new(1234 << 20))));
    assert_eq!(found[0].processes[0].pid, 4321);
    assert_eq!(found[1].capacity, Some(Bytes::new(15360 << 20)));
}

#[test]
fn timelines() {
    let raw = "[[-1, 1, 512, 0], [2000, 2, 1024, 3], [3000, 3, -1024, 3], [3000, 3, 1024, 4], [5000, 2, 256, 7], [9000, 4, -1024, 4], [9000, 4, -9, 4]]";
    let Timeline::Raw(read) = Timeline::read(raw.as_bytes()).unwrap() else { panic!() };
    let RawTimeline { tape, warnings, entries } = *read;
    tape.validate().unwrap();
    assert_eq!((entries, warnings.len()), (7, 2));
    let peak = ledger::replay(&tape, None).peaks.get(Measure::Allocated).cloned().unwrap();
    let rows: Vec<_> = peak.contributors.iter().map(|row| (row.category.as_str(), row.bytes.get())).collect();
    assert_eq!(rows, [("activation", 1024), ("parameter", 512), ("unattributed", 256)]);
    let sums = "[[10, 30], [[0, 5, 0, 0, 0, 0, 0, 0, 1], [0, 5, 0, 2, 0, 0, 0, 0, 1]]]";
    let Timeline::Sums(series) = Timeline::read(sums.as_bytes()).unwrap() else { panic!() };
    let allocated: Vec<_> = series.column(Figure::Allocated).map(|(_, bytes)| bytes.get()).collect();
    assert_eq!(allocated, [6, 8]);
    assert_eq!(series.extras[0].values, [Some(0.0), Some(20.0)]);
    let names: Vec<_> = series.extras.iter().map(|extra| extra.name.as_str()).collect();
    assert_eq!(names, ["microseconds", "parameter", "input", "unknown"]);
    for damaged in ["[]", "[[1], []]", "[[1], [[1]]]", "[[1,2,3]]", "[[\"a\"]]", "[[-1, 9, 5, 5]]"] {
        assert!(Timeline::read(damaged.as_bytes()).is_err(), "{damaged}");
    }
}

#[test]
fn what_a_file_is() {
    for (head, form) in [
        (&b"\x80\x04}"[..], Form::Pickle),
        (b"vramledger-tape/1", Form::Document),
        (b"{\"format\": \"vramledger/1\"", Form::Document),
        (b"[{\"name\": \"w\", \"category\": \"parameter\", \"size_mb\": 1}", Form::Document),
        (b"{\n \"schemaVersion\": 1,\n \"deviceProperties\": [", Form::Trace),
        (b"[{\"ph\": \"X\"", Form::Trace),
        (b"[[-1, 1, 512, 0]", Form::Timeline),
        (b"{\"step\": 1, \"allocated_mb\": 5}\n{\"step\": 2}", Form::Text),
        (b"{\"step\": 1, \"loss\": 5}\n{\"step\": 2}", Form::Text),
        (b"{'allocated_bytes.all.current': 5}", Form::Text),
        (b"{\"allocated_bytes.all.current\": 5}", Form::Text),
        (b"{\"log_history\": [", Form::Records),
        (b"[{\"step\": 1, \"allocated_mb\": 5}]", Form::Records),
        (b"[rank0]: torch.OutOfMemoryError", Form::Text),
        (b"\xff\xfes\0", Form::Text),
        (b"step,allocated\n", Form::Text),
        (b" \n", Form::Empty),
        (b"\x89PNG\r\n", Form::Other("a PNG image")),
        (b"PK\x03\x04....archive/data.pkl", Form::Other("a torch.save zip archive: a checkpoint")),
        (b"\x10\0\0\0\0\0\0\0{\"w\": {}", Form::Other("a safetensors checkpoint")),
        (b"{\"architectures\": [\"x\"]", Form::Other("a model's config.json: `vramledger plan` reads it")),
        (b"a\0b", Form::Other("a binary file of no known form")),
    ] {
        assert_eq!(recognise(head), form, "{}", String::from_utf8_lossy(head));
    }
    let form = |text: &str| text_form(text, |text| text.contains("out of memory"));
    assert_eq!(form("<!DOCTYPE html>"), TextForm::Other("an HTML page; the file it was made from is read"));
    assert_eq!(form("CUDA out of memory."), TextForm::OutOfMemory);
    assert_eq!(form(SUMMARY), TextForm::Summary);
    assert_eq!(form("memory.used [MiB]\n5 MiB\n"), TextForm::Smi);
    assert_eq!(form("import torch\n"), TextForm::Other("a program's source; `vramledger emulate` runs one"));
    assert_eq!(form("step 1"), TextForm::Log);
    let wide: Vec<u8> =
        [0xff, 0xfe].into_iter().chain("aß\n".encode_utf16().flat_map(u16::to_le_bytes)).collect();
    assert_eq!(text(&wide), "aß\n");
}
