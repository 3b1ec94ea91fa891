//! `emulate` as a process: what it refuses, how it ends, what it leaves. A shell script plays Python,
//! and any library the emulated device, for none of this needs PyTorch.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

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
