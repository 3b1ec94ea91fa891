//! `read`: traces, timelines and logs, and files that are no evidence.

use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::Write as _;

use crate::run::Folder;

const TRACE: &str = include_str!("../../../../fuzz/seeds/trace/steps.json");

#[test]
fn a_trace_packed_or_not_is_a_ledger() {
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(TRACE.as_bytes()).unwrap();
    let folder = Folder::new().with("t.json", TRACE).with("t.json.gz", packed.finish().unwrap());
    let plain = folder.run("read t.json --format json").json();
    assert_eq!(plain["peaks"]["allocated"]["bytes"], 1536);
    assert_eq!(plain["reading"]["file"]["form"], "profiler_trace");
    assert_eq!(plain["reading"]["instant"]["by"], "operator");
    let packed = folder.run("read t.json.gz --format json").json();
    assert_eq!(packed["peaks"], plain["peaks"]);
    let page = folder.run("read t.json").stdout;
    assert!(page.starts_with("t peaks at <0.01 MiB allocated in step 1, backward"), "{page}");
    assert!(page.contains("`ProfilerStep#0` is step 1 here"), "{page}");
    // A trace has no requests, and no addresses to follow blocks by.
    let heads = page.lines().find(|line| line.starts_with("step  "));
    assert_eq!(heads, Some("step  passes  allocated  reserved  in        at the end  change"), "{page}");
    assert_eq!(plain["reading"]["file"]["hidden_block_bytes"], serde_json::Value::Null);
    assert_eq!(plain["reading"]["file"]["stacks"], 2);
    assert_eq!(folder.run_with("read -", TRACE.as_bytes()).exit, Some(0));
    assert_eq!(folder.run("read t.json -o t.vlt").exit, Some(0));
    assert_eq!(folder.run("read t.vlt --format json").json()["peaks"], plain["peaks"]);
    assert_eq!(folder.run("read t.json --at 999").exit, Some(2));
    assert_eq!(folder.run("read t.json --what-if expandable_segments:True").exit, Some(2));
}

#[test]
fn a_timeline_tells_categories_and_no_steps() {
    let timeline = include_str!("../../../../fuzz/seeds/trace/raw-timeline.json");
    let folder = Folder::new().with("t.json", timeline);
    insta::assert_snapshot!(folder.run("read t.json").all(), @r"
    exit 0
    --- stdout
    t peaks at 1792 B allocated
    a memory timeline of PyTorch's profiler, 118 B; 6 entries over 7 us; steps are not told; the device
    holds 1 object of 512 B at the first entry already

    Peaks, B
    measure    peak  event
    allocated  1792      3

    Who is there (event 3, at 3 us), allocated B
    category      count  held    share
    activation        1  1024   57.1 %
    parameter         1   512   28.6 %
    unattributed      1   256   14.3 %
    all               3  1792  100.0 %

    What the file does not tell
      - the device: 512 B are in use already when the recording begins (one object); which operator made
        them is not known

    How to read this
      - categories are those that PyTorch's profiler infers; who made an object is not in a timeline
      - which device it is of, and what is reserved, is not in a timeline
    ");
    let file = folder.run("read t.json --format json").json()["reading"]["file"].clone();
    for unknown in ["stacks", "requests_without_stack", "updates", "block_disagreements"] {
        assert_eq!(file[unknown], serde_json::Value::Null, "{unknown}");
    }
    assert_eq!(file["devices"][0]["let_go"], serde_json::Value::Null);
}

#[test]
fn the_page_of_a_step_log() {
    let log = "step,allocated_mib,reserved_mib,loss\n0,66,220,1.5\n20,106,2980,\n";
    let folder = Folder::new().with("log.csv", log);
    insta::assert_snapshot!(folder.run("read log.csv").all(), @r"
    exit 0
    --- stdout
    log: allocated from 66.00 MiB to 106.00 MiB, reserved from 220.00 MiB to 2980.00 MiB
    a step log, 63 B; 2 points from 0 to 20; `allocated_mib` is allocated; `reserved_mib` is reserved

    Growth is not known: fewer than four rows after the warm-up do not tell growth from chance.

    Figures, MiB
    figure      first     last   least     most  at step  points
    allocated   66.00   106.00   66.00   106.00       20       2
    reserved   220.00  2980.00  220.00  2980.00       20       2

    Points, MiB
    step  allocated  reserved
       0      66.00    220.00
      20     106.00   2980.00

    How to read this
      - a log has what was there at the moments that it tells of, and nothing of what was between them
    ");
    let json = folder.run("read log.csv --format json").json();
    assert_eq!(json["series"][0]["points"][1]["reserved_bytes"], 2980_u64 << 20);
    assert_eq!(json["series"][0]["extras"][0]["values"][1], serde_json::Value::Null);
    let sheet = folder.run("read log.csv --format csv").stdout;
    assert_eq!(sheet.lines().nth(1), Some(",0,69206016,230686720,,,,"));
}

#[test]
fn what_is_no_evidence_is_named() {
    for (name, bytes, what) in [
        ("a.png", &b"\x89PNG\r\n\x1a\n"[..], "is a PNG image"),
        ("a.pt", b"PK\x03\x04\0\0archive/data.pkl", "is a torch.save zip archive"),
        ("a.safetensors", b"\x10\0\0\0\0\0\0\0{\"w\": {}}      ", "is a safetensors checkpoint"),
        ("a.html", b"<!DOCTYPE html><html>", "is an HTML page"),
        ("a.log", b"starting\nepoch one\n", "is a text without figures of memory"),
        ("a.csv", b"step,loss\n1,2\n", "is a text without figures of memory"),
        ("a.json", b"{\"traceEvents\": []}", "not one `[memory]` instant"),
        ("empty", b"", "is empty"),
    ] {
        let answer = Folder::new().with(name, bytes).run(&format!("read {name}"));
        assert_eq!(answer.exit, Some(2), "{name}");
        assert!(answer.stderr.contains(what), "{name}: {}", answer.stderr);
        assert_eq!(answer.stdout, "", "{name}");
    }
}

#[test]
fn accounts_and_cards_are_instants() {
    let summary = include_str!("../../../../fuzz/seeds/text/summary.txt");
    let smi = include_str!("../../../../fuzz/seeds/text/smi.csv");
    let apps = include_str!("../../../../fuzz/seeds/text/apps.csv");
    let wide: Vec<u8> =
        [0xff, 0xfe].into_iter().chain(smi.encode_utf16().flat_map(u16::to_le_bytes)).collect();
    let failed =
        format!("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n{summary}");
    let folder = Folder::new()
        .with("s.txt", summary)
        .with("smi.csv", smi)
        .with("wide.csv", wide)
        .with("apps.csv", apps)
        .with("failed.log", failed);
    let json = |name: &str| folder.run(&format!("read {name} --format json")).json();
    let at = json("s.txt")["instants"][0].clone();
    assert_eq!((at["source"].as_str(), at["allocated_bytes"].as_u64()), (Some("summary"), Some(122_368)));
    assert_eq!(at["unit_bytes"], 1024);
    assert_eq!(at["used_bytes"], serde_json::Value::Null);
    for name in ["smi.csv", "wide.csv"] {
        let at = json(name)["instants"][0].clone();
        assert_eq!((at["used_bytes"].as_u64(), at["device"].as_u64()), (Some(1 << 30), Some(0)), "{name}");
    }
    assert_eq!(json("apps.csv")["instants"][0]["other_processes"][0]["name"], "python3");
    let both = json("failed.log");
    let sources: Vec<_> =
        both["instants"].as_array().unwrap().iter().map(|at| at["source"].as_str()).collect();
    assert_eq!(sources, [Some("oom"), Some("summary")]);
    insta::assert_snapshot!(folder.run("read s.txt").all(), @r"
    exit 0
    --- stdout
    s on device 0: 119.50 KiB allocated, 34.00 MiB reserved, 32.17 MiB allocated at most so far
    a table of `torch.cuda.memory_summary()`, which is rounded: each figure may be up to 1024 B more.
    Every request so far found room. Who holds the memory is not in an account of the allocator.

    Figures, MiB
    figure          amount  which is
    allocated         0.12  in blocks
    reserved         34.00  in segments
    in no block      33.88  reserved less allocated
    peak allocated   32.17  the most so far
    peak reserved    34.00  the most so far
    no room              0  requests so far
    retries              0  times that the cache was given back
    ");
}

#[test]
fn a_log_of_stranding_is_no_ones_fault() {
    let log = "cycle,allocated_mib,reserved_mib\n0,66,220\n20,106,2980\n40,146,5760\n60,186,8520\n80,226,11300\n100,266,14060\n";
    let folder = Folder::new().with("log.csv", log);
    let page = folder.run("read log.csv --capacity 16384MiB").stdout;
    let growth: Vec<&str> = page.lines().skip_while(|line| !line.starts_with("Reserved")).take(5).collect();
    insta::assert_snapshot!(growth.join("\n"), @r"
    Reserved memory strands, 138.46 MiB a step: reserved memory grows 69 times faster than allocated
    memory: the allocator takes more of the device while what it has lies free in pieces that do not
    fit, beside blocks that stay; it is not that the program keeps so much.
    A step, from step 0 to 100, with intervals of 95 %: allocated +2.00 MiB; reserved +138.46 MiB
    (+138.26 MiB to +138.65 MiB). At that pace 16.00 GiB are full at about step 117, 17 from the last.
    ");
    assert!(!page.contains("leak"), "{page}");
    let growth = &folder.run("read log.csv --capacity 16384MiB --format json").json()["series"][0]["growth"];
    assert_eq!(growth["verdict"], "stranding");
    assert_eq!(growth["allocated"]["bytes_per_step"], 2 << 20);
    assert_eq!((&growth["full_at_step"], &growth["steps_until_full"]), (&117.into(), &17.into()));
    let markdown = folder.run("read log.csv --format markdown").stdout;
    assert!(markdown.contains("69 times faster"), "{markdown}");
}
