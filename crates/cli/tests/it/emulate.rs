//! `emulate` as a process: what it refuses, how it ends, what it leaves. A shell script plays Python,
//! and any library the emulated device, for none of this needs PyTorch.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use flate2::read::GzDecoder;
use serde_json::{Value, json};

use crate::run::{Answer, Folder};

/// A Python with a torch that suits.
const GOOD: &str = r#"{"python": "3.12.3", "system": "linux", "machine": "x86_64", "torch": "2.15.0+cu132", "cuda": "13.2"}"#;

/// A folder with a `python` that says of itself what `probe` holds, and otherwise runs `script`.
fn stage(probe: &str, script: &str) -> Folder {
    let text =
        format!("#!/bin/sh\nif [ \"$1\" = -c ]; then\ncat <<'END'\n{probe}\nEND\nexit\nfi\n{script}\n");
    let folder = Folder::new().with("python", text);
    fs::set_permissions(folder.path().join("python"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(folder.path().join("tmp")).unwrap();
    folder
}

/// `vramledger` with the words of `line`, where a library of this process stands for the emulated device.
fn command(folder: &Folder, line: &str) -> Command {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let library =
        maps.split_whitespace().find(|word| word.contains("libc.so") || word.contains("libc-")).unwrap();
    let mut command = folder.command(line);
    command.env("VRAMLEDGER_EMULATOR_LIBRARY", library).env("TMPDIR", folder.path().join("tmp"));
    command
}

/// The answer, and that nothing is left in the folder for temporary files.
fn emulate(folder: &Folder, line: &str) -> Answer {
    let output = command(folder, line).stdin(Stdio::null()).output().unwrap();
    assert_no_rest(folder);
    Answer {
        exit: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

fn assert_no_rest(folder: &Folder) {
    assert_eq!(fs::read_dir(folder.path().join("tmp")).unwrap().count(), 0);
}

/// A folder whose `python` leaves the recording `name` of `tests/truth/recordings`, with its `run.json`
/// changed, and ends with `code`.
fn recorded(name: &str, code: u8, change: impl FnOnce(&mut Value)) -> Folder {
    let recording = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/truth/recordings").join(name);
    let mut snapshot = Vec::new();
    let packed = fs::File::open(recording.join("snapshot.pickle.gz")).unwrap();
    GzDecoder::new(packed).read_to_end(&mut snapshot).unwrap();
    let mut run = serde_json::from_slice(&fs::read(recording.join("run.json")).unwrap()).unwrap();
    change(&mut run);
    let script = format!("cp snapshot.pickle run.json $VRAMLEDGER_RECORD\nexit {code}");
    stage(GOOD, &script).with("snapshot.pickle", snapshot).with("run.json", run.to_string())
}

/// What `look` finds, waited for.
fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "it never came");
        thread::sleep(Duration::from_millis(10));
    }
}

/// The process whose number is in the file at `path`.
fn process(path: &Path) -> PathBuf {
    let number = fs::read_to_string(path).unwrap();
    PathBuf::from(format!("/proc/{}", number.trim()))
}

#[test]
fn a_program_that_is_not_there() {
    let folder = stage(GOOD, "");
    insta::assert_snapshot!(emulate(&folder, "emulate -- ./python3.99 train.py").all(), @r"
    exit 2
    --- stderr
    error: failed to start `./python3.99`
    caused by: No such file or directory (os error 2)
    ");
    insta::assert_snapshot!(emulate(&folder, "emulate -- ./train.sh 7").all(), @r"
    exit 2
    --- stderr
    error: failed to start `./train.sh 7`
    caused by: No such file or directory (os error 2)
    ");
}

#[test]
fn a_python_without_a_torch_that_suits_is_told_what_to_install() {
    let refused = |probe: &str| emulate(&stage(probe, "echo started"), "emulate -- ./python train.py").all();
    let without = GOOD.replace(r#""2.15.0+cu132""#, "null").replace(r#""13.2""#, "null");
    insta::assert_snapshot!(refused(&without), @r"
    exit 2
    --- stderr
    error: `./python` (Python 3.12.3) has no torch
    hint: install PyTorch's CUDA build with `./python -m pip install torch`: it needs no GPU
    ");
    let cpu = GOOD.replace("+cu132", "+cpu").replace(r#""13.2""#, "null");
    insta::assert_snapshot!(refused(&cpu), @r"
    exit 2
    --- stderr
    error: torch 2.15.0+cpu of `./python` is built without CUDA
    hint: install the CUDA build, the usual one on Linux, with `./python -m pip install --force-reinstall torch`: it needs no GPU
    ");
    insta::assert_snapshot!(refused(&GOOD.replace("2.15.0", "2.4.1")), @r#"
    exit 2
    --- stderr
    error: emulation knows torch 2.6 to 2.15, and `./python` has torch 2.4.1+cu132
    hint: install one of them with `./python -m pip install "torch>=2.6,<2.16"`
    "#);
    insta::assert_snapshot!(refused(&GOOD.replace("linux", "darwin").replace("x86_64", "arm64")), @r"
    exit 2
    --- stderr
    error: emulation needs Linux on x86-64, and `./python` runs on darwin arm64
    hint: run it on such a machine or in such a container; no GPU is needed
    ");
    insta::assert_snapshot!(refused("no JSON"), @r"
    exit 2
    --- stderr
    error: `./python` cannot tell what it is
    caused by: it answers nothing
    ");
}

#[test]
fn jobs_and_cards_that_cannot_be_are_refused_before_anything_runs() {
    let folder = stage(GOOD, "echo started");
    let refused =
        |line: &str| emulate(&folder, &format!("emulate {line} -- ./python train.py")).sentence().to_owned();
    assert_eq!(refused("--gpus 8 --rank 8"), "`--rank` must be below the 8 of `--gpus`, not 8");
    assert_eq!(refused("--gpus 8 --nodes 3"), "`--gpus` must be a multiple of the 3 of `--nodes`, not 8");
    assert_eq!(refused("--gpu H100"), "no GPU of the catalogue is called `H100`");
    assert!(refused("--capacity 1MiB").starts_with("`--context` must be less than the capacity"));
    assert!(refused("--steps none").ends_with("it must be a whole number of at least 1, or `all`"));
}

#[test]
fn the_program_finds_its_surroundings_and_its_streams_pass_through() {
    let script = r#"
echo "arguments: $*"
cat
echo "to stderr" >&2
echo "$VRAMLEDGER_GPU_NAME, $VRAMLEDGER_GPU_CAPABILITY, $VRAMLEDGER_GPU_SMS"
echo "$VRAMLEDGER_GPU_CAPACITY $VRAMLEDGER_GPU_CONTEXT $VRAMLEDGER_STEPS $PYTORCH_CUDA_ALLOC_CONF"
echo "rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE at $MASTER_ADDR"
for folder in "${PYTHONPATH%%:*}" "${LD_LIBRARY_PATH%%:*}"; do ls "$folder"; done
echo "${PYTHONPATH##*:} ${LD_LIBRARY_PATH##*:} ${LD_PRELOAD##*/}"
exit 3"#;
    let folder = stage(GOOD, script);
    let line = "emulate --gpu A100-40GB --context 500MiB --steps all --alloc-conf expandable_segments:True --gpus 16 --rank 11 --nodes 2 -- ./python train.py --gpu mine -o theirs";
    let mut child = command(&folder, line)
        .env("PYTHONPATH", "/user/python")
        .env("LD_LIBRARY_PATH", "/user/lib")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"from stdin\n").unwrap();
    let output = child.wait_with_output().unwrap();
    insta::assert_snapshot!(String::from_utf8(output.stdout).unwrap(), @r"
    arguments: train.py --gpu mine -o theirs
    from stdin
    NVIDIA A100-40GB, 8.0, 108
    42298834944 524288000 all expandable_segments:True
    rank 11 of 16, 3 of 8 at localhost
    sitecustomize.py
    vramledger_host.py
    vramledger_ranks.py
    vramledger_recorder.py
    libcuda.so.1
    libnvidia-ml.so.1
    /user/python /user/lib libcuda.so.1
    ");
    insta::assert_snapshot!(String::from_utf8(output.stderr).unwrap(), @r"
    to stderr
    error: `./python train.py --gpu mine -o theirs` ended with exit status 3
    ");
    assert_eq!(output.status.code(), Some(2));
    assert_no_rest(&folder);
}

#[test]
fn a_program_that_records_nothing() {
    let ended = |script: &str| emulate(&stage(GOOD, script), "emulate -o run.vlt -- ./python train.py").all();
    insta::assert_snapshot!(ended("exit 0"), @r"
    exit 2
    --- stderr
    error: `./python train.py` ended without using the GPU
    hint: what PyTorch does on CUDA is recorded; Python's -E, -I and -S keep the recorder out
    ");
    insta::assert_snapshot!(ended("kill -SEGV $$"), @r"
    exit 2
    --- stderr
    error: `./python train.py` ended with signal 11 (SIGSEGV)
    ");
}

#[test]
fn a_program_that_hangs_is_ended_with_all_it_has_started() {
    // One process of its own session, one that heeds no SIGTERM, and the program waits for both.
    let script = r#"
echo '{"step": 2, "micro_batch": 1, "phase": "backward", "allocated_bytes": 5}' > "$VRAMLEDGER_RECORD/progress.jsonl"
setsid sh -c 'echo $$ > own-session; sleep 600' &
sh -c 'trap "" TERM; echo $$ > stubborn; while :; do sleep 1; done' &
wait"#;
    let folder = stage(GOOD, script);
    let answer = emulate(&folder, "emulate --timeout 1 -o run.vlt -- ./python train.py");
    insta::assert_snapshot!(answer.all(), @r"
    exit 2
    --- stderr
    error: `./python train.py` was ended after 1 s at step 2, backward
    hint: `--timeout` gives it more time
    ");
    for name in ["own-session", "stubborn"] {
        assert!(!process(&folder.path().join(name)).exists(), "{name}");
    }
    assert_eq!(folder.files(), ["own-session", "python", "stubborn", "tmp"]);
}

#[test]
fn what_a_program_leaves_running_ends_with_it() {
    let folder =
        stage(GOOD, "(sh -c 'echo $$ > daemon; exec sleep 600' &)\nwhile ! [ -s daemon ]; do :; done");
    assert_eq!(emulate(&folder, "emulate -- ./python train.py").exit, Some(2));
    assert!(!process(&folder.path().join("daemon")).exists());
}

#[test]
fn ctrl_c_ends_the_program_and_leaves_nothing() {
    let folder = stage(GOOD, "sleep 600 &\necho $! > worker\necho $$ > leader\nwait");
    let mut child = command(&folder, "emulate -o run.vlt --snapshot run.pickle -- ./python train.py")
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let leader = folder.path().join("leader");
    wait_for(|| fs::read_to_string(&leader).ok().filter(|number| number.ends_with('\n')));
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    wait_for(|| child.try_wait().unwrap());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "error: `./python train.py` was interrupted\n");
    for name in ["leader", "worker"] {
        assert!(!process(&folder.path().join(name)).exists(), "{name}");
    }
    assert_eq!(folder.files(), ["leader", "python", "tmp", "worker"]);
    assert_no_rest(&folder);
}

#[test]
fn a_program_that_fits_is_told_as_a_plan_is() {
    let folder = recorded("mlp", 0, |_| ());
    let answer = emulate(&folder, "emulate --snapshot kept.pickle -o run.vlt -- ./python train.py");
    assert_eq!((answer.exit, answer.stderr.as_str()), (Some(0), ""));
    let page: Vec<&str> = answer.stdout.lines().take_while(|line| *line != "Not in these figures").collect();
    insta::assert_snapshot!(page.join("\n"), @r"
    `./python train.py` fits on H100-80GB: reserves 58.00 MiB, 79.05 GiB to spare; allocated peaks at
    36.20 MiB (backward, step 2)
    torch 2.15.0+cu132; H100-80GB 79.65 GiB, of which 79.11 GiB for the allocator

    Phases, MiB: the largest totals, and what is held at the end
    step  phase     reserved  allocated           at the end  weights  gradients  optimizer  other
       0  load         22.00       4.88                 4.88     1.00          0          0   3.88
       1  forward      24.00       6.07                 1.25     1.00          0          0   0.25
          backward     56.00      34.19                 2.07     1.00       1.00          0   0.06
          update       58.00       5.08                 3.07     1.00          0       2.01   0.06
     2-3  forward      58.00       8.07                 3.26     1.00          0       2.01   0.25
          backward     58.00      36.20  <- peak        4.07     1.00       1.00       2.01   0.06
          update       58.00       5.08                 3.07     1.00          0       2.01   0.06

    The card when most is reserved, MiB
    measure       total       more  which is
    requested      4.07             asked for by the program
    allocated      4.07     +<0.01  rounding up to blocks
    active         4.07         +0  blocks that wait for other streams
    reserved      58.00     +53.93  cached by the allocator
    process      608.00    +550.00  CUDA context: differs by card, driver and loaded kernels
    device     81559.00  +80951.00  left of the card

    At the peak, MiB
    what                   held   share
    weights                1.00   2.8 %
    gradients              1.00   2.8 %
    optimizer state        2.01   5.5 %
    input                  0.06   0.2 %
    temporaries            0.13   0.3 %
    workspace of kernels  32.00  88.4 %
    the rest              <0.01   0.0 %

    Nothing grows from step to step: nothing that is made in a step is there when later ones are over.
    ");
    let file = |name: &str| fs::read(folder.path().join(name)).unwrap();
    assert!(file("kept.pickle") == file("snapshot.pickle"));
    // The tape is read back, and is the run.
    let compared = folder.run("compare run.vlt again=run.vlt --format json").json();
    assert_eq!(compared["candidates"][0]["saving_bytes"], 0);
}

#[test]
fn the_document_of_an_emulated_run() {
    let folder = recorded("mlp", 0, |_| ());
    let answer = emulate(&folder, "emulate --format json -- ./python train.py --epochs 3").json();
    assert_eq!(answer["format"], "vramledger/1");
    assert_eq!(answer["provenance"], "emulated");
    assert_eq!(answer["subject"]["program"], json!(["./python", "train.py", "--epochs", "3"]));
    let software = json!({"torch": "2.15.0+cu132", "python": "3.12.3", "cuda": "13.2"});
    assert_eq!(answer["subject"]["software"], software);
    assert_eq!((&answer["fits"], &answer["oom"]), (&json!(true), &Value::Null));
    assert_eq!(answer["warnings"], json!([]));
    // PyTorch's own figures where a phase begins are those at the end of the phase before.
    let marks = fs::read_to_string(folder.path().join("run.json")).unwrap();
    let marks: Value = serde_json::from_str(&marks).unwrap();
    let mut rows = answer["phases"].as_array().unwrap().iter();
    let mut compared = 0;
    let place = |value: &Value| (value["step"].clone(), value["micro_batch"].clone(), value["phase"].clone());
    for pair in
        marks["marks"].as_array().unwrap().windows(2).filter(|pair| place(&pair[0]) != place(&pair[1]))
    {
        let row = rows.next().unwrap();
        assert_eq!(place(row), place(&pair[0]));
        for measure in ["allocated_bytes", "reserved_bytes"] {
            assert_eq!(row["end"][measure], pair[1][measure], "{:?} {measure}", place(row));
            compared += 1;
        }
        let held = row["end_by_category"].as_object().unwrap().values().map(|bytes| bytes.as_u64().unwrap());
        assert_eq!(held.sum::<u64>(), row["end"]["requested_bytes"]);
    }
    assert_eq!(compared, 20);
}

#[test]
fn a_program_that_runs_out_of_memory_is_no_failure_of_the_question() {
    let folder = recorded("oom", 1, |_| ());
    let line = "emulate --capacity 1310720000 --format json -- ./python train.py";
    let answer = emulate(&folder, line);
    assert_eq!(answer.exit, Some(1));
    let oom = &answer.json()["oom"];
    let at = [&oom["step"], &oom["micro_batch"], &oom["phase"]];
    assert_eq!(at, [&json!(1), &json!(1), &json!("forward")]);
    assert_eq!(oom["object"], "model.layers.1.mlp.down_proj linear.py:134 forward");
    assert_eq!(
        (&oom["requested_bytes"], &oom["device_request_bytes"]),
        (&json!(33_554_432), &json!(33_554_432))
    );
    let page = emulate(&folder, "emulate --capacity 1310720000 -- ./python train.py").stdout;
    let page: Vec<&str> = page.lines().take_while(|line| *line != "Not in these figures").collect();
    insta::assert_snapshot!(page.join("\n"), @r"
    `./python train.py` does not fit on H100-80GB: out of memory in forward of step 1
    It asks for 32.00 MiB for model.layers.1.mlp.down_proj linear.py:134 forward (event 220), for which
    the allocator tries to take 32.00 MiB of the card: 32.00 MiB more than is left; 700.00 MiB are
    reserved, and the largest free block of its kind has 12.19 MiB.
    torch 2.15.0+cu132; H100-80GB 1250.00 MiB, of which 700.00 MiB for the allocator

    Phases, MiB: the largest totals, and what is held at the end
    step  phase    reserved  allocated           at the end  weights  gradients  optimizer   other
       0  load        28.00      13.57                13.57    13.44          0          0    0.12
       1  forward    700.00     670.57  <- peak      670.57    13.44          0          0  657.13

    The card when it failed, MiB
    measure      total     more  which is
    requested   670.57           asked for by the program
    allocated   670.57   +<0.01  rounding up to blocks
    active      670.57       +0  blocks that wait for other streams
    reserved    700.00   +29.43  cached by the allocator
    process    1250.00  +550.00  CUDA context: differs by card, driver and loaded kernels
    device     1250.00       +0  left of the card

    Allocated when it failed, MiB
    what                 held   share
    weights             13.44   2.0 %
    activations        657.00  98.0 %
      mlp              280.00  41.8 %
      norms            128.25  19.1 %
      residual stream  120.50  18.0 %
      attention         64.25   9.6 %
      other             48.00   7.2 %
      embeddings        16.00   2.4 %
    the rest             0.13   0.0 %

    The largest holders when it failed, MiB
    objects                                                                category    count   held
    model.layers.*.mlp modeling_llama.py:164 forward                       activation      2  88.00
    model.layers.*.mlp.act_fn functional.py:2451 silu                      activation      2  88.00
    model.layers.*.mlp.gate_proj linear.py:134 forward                     activation      2  88.00
    model.layers.*.mlp.up_proj linear.py:134 forward                       activation      2  88.00
    model.layers.*.self_attn sdpa_attention.py:182 sdpa_attention_forward  activation      8  32.50
    ");
}

#[test]
fn a_program_that_crashes_is_told_with_its_own_error() {
    let failed = |run: &mut Value| {
        run["end"] = "failed".into();
        run["error"] = "ValueError: no such file".into();
    };
    let folder = recorded("mlp", 1, failed);
    let answer = emulate(&folder, "emulate --snapshot kept.pickle -o run.vlt -- ./python train.py");
    insta::assert_snapshot!(answer.all(), @r"
    exit 2
    --- stderr
    error: `./python train.py` ended with exit status 1
    caused by: ValueError: no such file
    ");
    assert_eq!(folder.files(), ["kept.pickle", "python", "run.json", "snapshot.pickle", "tmp"]);
    // One that only stumbles over its end, after the steps that were wanted, has answered.
    let answer = emulate(&recorded("mlp", 3, |_| ()), "emulate -- ./python train.py");
    assert_eq!(answer.exit, Some(0));
    assert_eq!(answer.stderr, "warning: after its last step the program ended with exit status 3\n");
}

#[test]
fn figures_that_are_not_pytorchs_own_are_warned_of() {
    let folder = recorded("mlp", 0, |run| {
        let allocated = &mut run["marks"][3]["allocated_bytes"];
        *allocated = (allocated.as_u64().unwrap() + 512).into();
    });
    let answer = emulate(&folder, "emulate --format json -- ./python train.py").json();
    let expected =
        "at mark 3 (backward of step 1) PyTorch counted 2169856 B allocated, and the replay 2169344 B";
    assert_eq!(answer["warnings"], json!([expected]));
}
