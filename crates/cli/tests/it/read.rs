//! `read`: what a memory snapshot of PyTorch says. The snapshots are recorded runs, and what was known of
//! them stands beside them.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use serde_json::{Value, json};

use crate::run::{Answer, Folder};

fn snaps() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/truth/snaps")
}

/// A folder with the snapshots of these names.
fn recorded(names: &[&str]) -> Folder {
    names.iter().fold(Folder::new(), |folder, name| folder.with(&format!("{name}.pickle"), snapshot(name)))
}

/// The bytes of the snapshot of this name.
fn snapshot(name: &str) -> Vec<u8> {
    let packed = std::fs::File::open(snaps().join(format!("{name}.pickle.gz"))).unwrap();
    let mut bytes = Vec::new();
    GzDecoder::new(packed).read_to_end(&mut bytes).unwrap();
    bytes
}

/// The names of all snapshots.
fn all() -> Vec<String> {
    let files = std::fs::read_dir(snaps()).unwrap().map(|file| file.unwrap().file_name());
    let pickles = files.filter_map(|file| Some(file.to_str()?.strip_suffix(".pickle.gz")?.to_owned()));
    let mut names: Vec<String> = pickles.collect();
    names.sort();
    assert_eq!(names.len(), 13);
    names
}

fn truth(name: &str) -> Value {
    let case: Value =
        serde_json::from_slice(&std::fs::read(snaps().join(format!("{name}.json"))).unwrap()).unwrap();
    case["truth"].clone()
}

fn json_of(name: &str, flags: &str) -> Value {
    recorded(&[name]).run(&format!("read {name}.pickle --format json {flags}")).json()
}

fn bytes(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

fn sum(rows: &Value, key: &str) -> i64 {
    rows.as_array().unwrap().iter().map(|row| row[key].as_i64().unwrap()).sum()
}

/// The lines of an answer from the one that begins with `start` on, up to an empty one.
fn part<'a>(answer: &'a Answer, start: &str) -> Vec<&'a str> {
    let lines = answer.stdout.lines().skip_while(|line| !line.starts_with(start));
    lines.take_while(|line| !line.is_empty()).map(str::trim_end).collect()
}

#[test]
fn the_page_of_a_small_run() {
    insta::assert_snapshot!(recorded(&["mlp-4x1024"]).run("read mlp-4x1024.pickle").all(), @r"
    exit 0
    --- stdout
    mlp-4x1024 peaks at 98.00 MiB allocated in step 2, backward, 128.00 MiB reserved
    a memory snapshot of PyTorch 2.15 or later, 33.45 KiB; 414 entries over 1.54 s; 3 training steps;
    GPU 0 is empty at the first entry; 46 % of the requests have no stack, as on autograd's threads

    Peaks, MiB
    measure      peak  step  micro-batch  phase     event
    requested   98.00     2            1  backward    186
    allocated   98.00     2            1  backward    186
    reserved   128.00     2            1  forward     115

    Who is there (event 186, step 2, backward, at 1.53 s), allocated MiB
    category          held   share
    optimizer_state  32.00  32.7 %
    workspace        32.00  32.7 %
    gradient         16.00  16.3 %
    parameter        16.00  16.3 %
    temporary         1.00   1.0 %
    input             1.00   1.0 %
    activation       <0.01   0.0 %

    The same by stack, MiB
    stack                                          category         count   held    share
    made in backward                               workspace            1  32.00   32.7 %
    __init__.py:5528 empty_like < train.py:94 new  parameter            4  16.00   16.3 %
    adam.py:179 _init_group < adam.py:239 step     optimizer_state      4  16.00   16.3 %
    adam.py:183 _init_group < adam.py:239 step     optimizer_state      4  16.00   16.3 %
    made in backward                               gradient             4  16.00   16.3 %
    made in backward                               temporary            1   1.00    1.0 %
    train.py:193 main < train.py:219 <module>      input                1   1.00    1.0 %
    2 more                                                              2  <0.01    0.0 %
    all                                                                21  98.00  100.0 %

    All measures at that instant, MiB
    measure     total    more  which is
    requested   98.00          asked for by the program
    allocated   98.00  +<0.01  rounding up to blocks
    active      98.00      +0  blocks that wait for other streams
    reserved   128.00  +30.00  cached by the allocator

    Steps, MiB: the largest totals, and what is requested and held at the end
      step  passes  requested  allocated  reserved  in        at the end  change
    before       0      16.00      16.00     20.00  load           16.00
         1       1      81.00      81.00     96.00  update         49.00  +33.00
         2       1      98.00      98.00    128.00  backward       49.00       0
         3       1      98.00      98.00    128.00  backward       49.00       0

    Nothing grows from step to step: nothing that is made in a step is there when later ones are over.

    Reserved and in no block when most is reserved: 46.00 MiB of 128.00 MiB, of which 8.00 MiB are whole
    segments that the allocator can give back, and 38.00 MiB lie beside blocks in use in 4 segments. The
    largest free block has 20.00 MiB.

    Segments that are kept, MiB
    segment   free  largest  kept by
      32.00  20.00    20.00  8.00 MiB optimizer_state from step 1, adam.py:183 _init_group; 1 other block
      32.00  12.00    12.00  12.00 MiB optimizer_state from step 1, adam.py:179 _init_group; 2 other blocks
      20.00   4.00     4.00  16.00 MiB parameter from before the steps, __init__.py:5528 empty_like
       2.00   2.00     2.00  512 B activation from step 1, train.py:195 main

    Reserved and in no block at the end: 79.00 MiB of 128.00 MiB, of which 40.00 MiB are whole segments
    that the allocator can give back, and 39.00 MiB lie beside blocks in use in 5 segments. The largest
    free block has 32.00 MiB.

    Segments that are kept, MiB
    segment   free  largest  kept by
      32.00  20.00    20.00  8.00 MiB optimizer_state from step 1, adam.py:183 _init_group; 1 other block
      32.00  12.00    12.00  12.00 MiB optimizer_state from step 1, adam.py:179 _init_group; 2 other blocks
      20.00   4.00     4.00  16.00 MiB parameter from before the steps, __init__.py:5528 empty_like
       2.00   2.00     1.00  512 B activation from step 3, train.py:195 main
       2.00   1.00     1.00  1.00 MiB input from step 3, train.py:193 main

    `--what-if expandable_segments:True` tells what the same requests would have reserved then.

    How to read this
      - steps, phases and categories are inferred from stacks, lifetimes and sizes; what they do not
        tell is unattributed
      - what lies outside the allocator (the CUDA context, NCCL, other processes) is not in a snapshot
    ");
}

#[test]
fn a_failure_is_told_with_who_was_there_and_whether_settings_help() {
    let answer = recorded(&["llama-oom"]).run("read llama-oom.pickle --by category");
    let text: Vec<&str> =
        answer.stdout.lines().take_while(|line| !line.starts_with("All measures")).collect();
    insta::assert_snapshot!(text.join("\n"), @r"
    llama-oom: out of memory in step 1, forward on GPU 0: a request of 250.00 MiB found no room
    a memory snapshot of PyTorch 2.15 or later, 47.71 KiB; 336 entries over 7 ms; no optimizer step; GPU
    0 is empty at the first entry
    It asks for 250.00 MiB for loss_utils.py:61 ForCausalLMLoss < modeling_llama.py:475 forward (event
    256), for which the allocator tries to take 250.00 MiB of the card: 114.00 MiB more than is left;
    564.00 MiB are reserved, and the largest free block of its kind has 10.00 MiB; the device has 136.00
    MiB left.

    Peaks, MiB
    measure      peak  step  micro-batch  phase    event
    requested  548.78     1            1  forward    253
    allocated  549.88     1            1  forward    253
    reserved   596.00     1            1  forward    251

    Who was there when it failed (event 256, step 1, forward, at 7 ms), allocated MiB
    category    count    held    share
    activation     45  511.03   98.7 %
    parameter      21    6.72    1.3 %
    2 more          3    0.13    0.0 %
    all            69  517.88  100.0 %
    ");
    let document = json_of("llama-oom", "");
    assert_eq!(document["fits"], false);
    assert_eq!(document["oom"]["requested_bytes"], 262_144_000);
    assert_eq!(document["oom"]["device_free_bytes"], 136 << 20);
    assert_eq!(document["headroom_bytes"], -(114 << 20));
    assert_eq!(document["reading"]["remedy"]["helps"], false);
    let held = bytes(&document["oom"]["held"]["allocated_bytes"]);
    assert_eq!(sum(&document["oom"]["holders"], "bytes"), held.cast_signed());
}

#[test]
fn kept_graphs_are_growth_with_owners_and_bytes_a_step() {
    let answer = recorded(&["gpt2-leak"]).run("read gpt2-leak.pickle");
    let growth = [part(&answer, "It grows"), part(&answer, "What grows")].concat().join("\n");
    insta::assert_snapshot!(growth, @r"
    It grows by 19.72 MiB a step: every step leaves results of its forward pass behind, and what
    autograd saved among them, which its backward pass does not let go: something keeps the graph of
    each step, such as a list of losses without `.detach()` or `.item()`, or `retain_graph=True`.
    A step, from step 1 to 7, with intervals of 95 %: allocated +19.72 MiB; reserved +24.14 MiB (+18.72
    MiB to +29.56 MiB).
    What is kept how: keeping a tensor, as `kept.append(loss)` does, keeps its storage on the device
    and, as long as it has a `grad_fn`, its graph with all that autograd saved for it and no backward
    pass has let go. `loss.item()` keeps a number on the host and nothing on the device. `loss.detach()`
    keeps the storage without the graph: little for a scalar, all of it for logits or features, which
    `.detach().cpu()` moves to the host. Under `torch.no_grad()` no graph is made, but a result that is
    kept is still there.
    What grows, requested MiB
    made at                                                       category    a step  objects          of  in steps  count    now
    activations.py:66 forward < modeling_gpt2.py:242 forward      activation    8.00        8    1.00 MiB       2-8     64  64.00
    functional.py:3561 cross_entropy < …                          activation    4.88        3    1.63 MiB       2-8     24  39.06
    pytorch_utils.py:119 forward < modeling_gpt2.py:241 forward   activation    2.00        2    1.00 MiB       2-8     16  16.00
    pytorch_utils.py:119 forward < modeling_gpt2.py:187 forward   activation    1.50        2  768.00 KiB       2-8     16  12.00
    functional.py:2993 layer_norm < normalization.py:228 forward  activation    1.26       15   86.00 KiB       2-8    120  10.08
    functional.py:1497 dropout < dropout.py:73 forward            activation    0.56        6   96.00 KiB       2-8     48   4.50
    sdpa_attention.py:182 sdpa_attention_forward < …              activation    0.51        4  130.00 KiB       2-8     32   4.06
    modeling_gpt2.py:285 forward < modeling_gpt2.py:608 forward   activation    0.50        2  256.00 KiB       2-8     16   4.00
    4 more                                                                      0.50        5                           40   4.04
    ");
    let document = json_of("gpt2-leak", "");
    let growth = &document["reading"]["growth"];
    assert_eq!(sum(&growth["rows"], "bytes_per_step"), growth["bytes_per_step"].as_i64().unwrap());
    // What the recorded ends of the steps have more than the ones before.
    let ends: Vec<u64> = truth("gpt2-leak")["phases"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|row| row["phase"] == "update")
        .map(|row| bytes(&row["end_requested_bytes"]))
        .collect();
    for pair in ends.windows(2) {
        assert_eq!(pair[1] - pair[0], bytes(&growth["bytes_per_step"]));
    }
    for name in all().iter().filter(|name| *name != "gpt2-leak") {
        assert_ne!(json_of(name, "")["reading"]["growth"]["verdict"], "growing", "{name}");
    }
}

#[test]
fn stranded_memory_has_those_who_keep_it_and_other_settings_are_tried() {
    let name = "gpt2-varlen-stranding";
    let answer = recorded(&[name]).run(&format!(
        "read {name}.pickle --what-if expandable_segments:True --what-if max_split_size_mb:20"
    ));
    let told = [
        part(&answer, "Reserved and in no block when"),
        part(&answer, "Segments that are kept"),
        part(&answer, "The same requests"),
        part(&answer, "The replay"),
    ];
    insta::assert_snapshot!(told.concat().join("\n"), @r"
    Reserved and in no block when most is reserved: 2756.70 MiB of 3808.00 MiB, of which 2666.00 MiB are
    whole segments that the allocator can give back, and 90.70 MiB lie beside blocks in use in 11
    segments. The largest free block has 236.00 MiB.
    Segments that are kept, MiB; 6 more not shown
    segment   free  largest  kept by
      62.00  54.97    54.97  7.03 MiB activation from step 12, modeling_gpt2.py:310 forward
      20.00  10.53     7.03  7.03 MiB activation from step 12, sdpa_attention.py:182 sdpa_attention_forward; 1 other block
      20.00   5.94     5.94  14.06 MiB activation from step 12, functional.py:2993 layer_norm
      62.00   5.75     5.75  56.25 MiB activation from step 12, activations.py:66 forward
      62.00   5.75     5.75  56.25 MiB activation from step 12, activations.py:66 forward
    The same requests under other settings, GiB
    settings                  allocated  reserved  stranded  out of memory
    (as recorded)                  1.03      3.72      2.69  no (on a card without end)
    expandable_segments:True       1.03      1.18      0.15  no (on a card without end)
    max_split_size_mb:20           1.06      4.88      4.55  no (on a card without end)
    The replay under the recorded settings takes and gives back the recorded segments.
    ");
}

#[test]
fn every_figure_is_the_recorded_one() {
    for name in all() {
        let (document, truth) = (json_of(&name, ""), truth(&name));
        for measure in ["requested", "allocated", "reserved"] {
            let peak = &document["peaks"][measure];
            assert_eq!(peak["bytes"], truth[format!("peak_{measure}_bytes")], "{name} {measure}");
        }
        let peak = &document["peaks"]["allocated"];
        for key in ["step", "micro_batch", "phase"] {
            assert_eq!(peak[key], truth[format!("peak_{key}")], "{name} {key}");
        }
        let rows = document["phases"].as_array().unwrap();
        let known = truth["phases"].as_array().unwrap();
        assert_eq!(rows.len(), known.len(), "{name}");
        for (row, known) in rows.iter().zip(known) {
            for key in ["step", "micro_batch", "phase"] {
                assert_eq!(row[key], known[key], "{name}");
            }
            for measure in ["requested_bytes", "allocated_bytes", "reserved_bytes"] {
                assert_eq!(row["peak"][measure], known[format!("peak_{measure}")], "{name} {row}");
                assert_eq!(row["end"][measure], known[format!("end_{measure}")], "{name} {row}");
            }
        }
        let file = &document["reading"]["file"];
        let exact = (&file["blocks_agree"], &file["block_disagreements"], &file["hidden_block_bytes"]);
        assert_eq!(exact, (&json!(true), &json!(0), &json!(0)), "{name}");
    }
}

#[test]
fn rows_sum_to_what_they_stand_under() {
    for name in ["mlp-4x1024", "gpt2-expseg-fused", "llama-oom", "gpt2-maxsplit-varlen"] {
        let folder = recorded(&[name]);
        for by in ["stack", "line", "module", "size", "category"] {
            let document = folder.run(&format!("read {name}.pickle --by {by} --format json")).json();
            let instant = &document["reading"]["instant"];
            assert_eq!(instant["by"], by);
            assert_eq!(sum(&instant["rows"], "bytes"), instant["bytes"].as_i64().unwrap(), "{name} {by}");
            assert_eq!(instant["bytes"], instant["held"]["allocated_bytes"]);
            for stranding in document["reading"]["stranding"].as_array().unwrap() {
                let stranded = bytes(&stranding["stranded_bytes"]);
                assert_eq!(stranded, bytes(&stranding["reserved_bytes"]) - bytes(&stranding["active_bytes"]));
                assert_eq!(stranded, bytes(&stranding["whole_bytes"]) + bytes(&stranding["pinned_bytes"]));
                assert_eq!(sum(&stranding["segments"], "free_bytes"), stranded.cast_signed(), "{name}");
                for segment in stranding["segments"].as_array().unwrap() {
                    let kept = sum(&segment["pins"], "bytes").cast_unsigned();
                    assert_eq!(kept + bytes(&segment["free_bytes"]), bytes(&segment["bytes"]), "{name}");
                }
            }
        }
    }
}

#[test]
fn one_stack_or_one_step_can_be_looked_at() {
    let name = "qwen2-accum2-clip";
    let folder = recorded(&[name]);
    let read = |flags: &str| folder.run(&format!("read {name}.pickle --format json {flags}"));
    let instant = |flags: &str| read(flags).json()["reading"]["instant"].clone();
    let first = instant("--step 1");
    assert_eq!(first["step"], 1);
    let peak = truth(name)["phases"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|row| row["step"] == 1)
        .map(|row| bytes(&row["peak_allocated_bytes"]))
        .max();
    assert_eq!(bytes(&first["bytes"]), peak.unwrap());
    let event = bytes(&first["event"]);
    assert_eq!(instant(&format!("--at {event}"))["rows"], first["rows"]);
    let names = |flags: &str| {
        let rows = instant(flags)["rows"].as_array().unwrap().clone();
        rows.iter().map(|row| row["name"].as_str().unwrap().matches(" < ").count()).max()
    };
    assert_eq!((names("--depth 1"), names("--depth 4")), (Some(0), Some(3)));
    assert_eq!(read("--step 9").sentence(), format!("`{name}.pickle` has no step 9"));
    assert!(read("--at 99999999").sentence().starts_with(&format!("`{name}.pickle` has ")));
    assert_eq!(read("--device 3").sentence(), format!("`{name}.pickle` has nothing of GPU 3"));
    assert!(read("--what-if max_split_size_mb:1").sentence().contains("max_split_size_mb"));
}

#[test]
fn a_reading_is_a_ledger_that_other_commands_take() {
    let folder = recorded(&["mlp-4x1024"]);
    let read = folder.run("read mlp-4x1024.pickle -o run.vlt --format json");
    let folder = folder.with("run.json", &read.stdout);
    assert_eq!(read.json()["tape"], "run.vlt");
    let again = folder.run("read run.json --format json");
    assert_eq!(again.json()["reading"], read.json()["reading"]);
    assert_eq!(folder.run("read again=run.json").stdout.lines().next(), {
        let first = "again peaks at 98.00 MiB allocated in step 2, backward, 128.00 MiB reserved";
        Some(first)
    });
    let compared = folder.run("compare a=run.json b=mlp-4x1024.pickle --format json").json();
    assert_eq!(compared["candidates"][0]["saving_bytes"], 0);
    assert_eq!(compared["candidates"][0]["differences"], json!([]));
    let simulated = folder.run("simulate run.vlt --alloc-conf= --format json").json();
    assert_eq!(
        simulated["settings"][0]["devices"][0]["peak_reserved_bytes"],
        read.json()["peaks"]["reserved"]["bytes"]
    );
}

#[test]
fn two_runs_differ_by_rows_that_sum_to_the_difference() {
    let folder = recorded(&["llama-bf16", "llama-keepout"]);
    let answer = folder.run("compare llama-bf16.pickle llama-keepout.pickle");
    insta::assert_snapshot!(part(&answer, "What llama-keepout has").join("\n"), @r"
    What llama-keepout has more or less at its peak, MiB
    object                                                                   category         llama-bf16  llama-keepout  difference
    made in backward                                                         workspace                 0          32.00      +32.00
    made in backward                                                         temporary             32.00           6.23      -25.77
    functional.py:3561 cross_entropy < loss_utils.py:42 fixed_cross_entropy  activation            15.63          <0.01      -15.62
    linear.py:134 forward < modeling_llama.py:471 forward                    activation                0           5.86       +5.86
    made in backward                                                         gradient                  0           1.95       +1.95
    modeling_llama.py:164 forward < modeling_llama.py:313 forward            activation             2.75           2.06       -0.69
    modeling_llama.py:64 forward < modeling_llama.py:297 forward             activation             2.00           1.50       -0.50
    modeling_llama.py:64 forward < modeling_llama.py:312 forward             activation             2.00           1.50       -0.50
    modeling_llama.py:67 forward < modeling_llama.py:297 forward             activation             2.00           1.50       -0.50
    modeling_llama.py:67 forward < modeling_llama.py:312 forward             activation             2.00           1.50       -0.50
    linear.py:134 forward < modeling_llama.py:164 forward                    activation             5.50           5.05       -0.45
    adam.py:179 _init_group < adam.py:239 step                               optimizer_state        6.72           7.16       +0.44
    11 more                                                                                                                   -1.03
    all                                                                                                                       -5.31
    ");
    let document = folder.run("compare llama-bf16.pickle llama-keepout.pickle --format json").json();
    let candidate = &document["candidates"][0];
    assert_eq!(
        sum(&candidate["differences"], "difference_bytes"),
        -candidate["saving_bytes"].as_i64().unwrap()
    );
}

#[test]
fn the_sheet_has_every_section() {
    let sheet = recorded(&["gpt2-leak"])
        .run("read gpt2-leak.pickle --format csv --what-if expandable_segments:True")
        .stdout;
    let mut lines = sheet.lines();
    assert_eq!(
        lines.next(),
        Some("section,device,step,micro_batch,phase,event,measure,name,category,bytes,count")
    );
    let sections: std::collections::BTreeSet<&str> =
        lines.map(|line| line.split(',').next().unwrap()).collect();
    let expected = [
        "growth_per_step",
        "instant",
        "peak",
        "peak_by_category",
        "phase_end",
        "phase_end_by_category",
        "phase_peak",
        "pin",
        "slope",
        "step_end",
        "step_growth",
        "step_peak",
        "stranded",
        "what_if",
    ];
    assert!(sections.into_iter().eq(expected));
}

#[test]
fn what_is_no_snapshot_is_one_sentence() {
    let whole = snapshot("mlp-4x1024");
    let folder = Folder::new()
        .with("empty.pickle", "")
        .with("pointer.pickle", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        .with("half.pickle", &whole[..whole.len() / 2])
        .with("zip.pickle", b"PK\x03\x04rest")
        .with("text.pickle", "epoch 1: loss 2.3\n")
        .with("none.pickle", b"\x80\x04}\x94.");
    let sentence = |name: &str| folder.run(&format!("read {name}.pickle")).sentence().to_owned();
    assert_eq!(sentence("empty"), "`empty.pickle` is empty, and no evidence of a run's memory");
    assert!(sentence("pointer").contains("a pointer of Git LFS"));
    assert!(sentence("half").contains("the file is not complete"));
    assert!(sentence("zip").contains("a zip archive"));
    assert!(sentence("text").contains("a text without figures of memory"));
    assert!(sentence("none").contains("no memory snapshot"));
}
