//! Out-of-memory messages: every recorded sample, and what logs do to a message.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails, helpers included")]

use evidence::oom::Message;
use evidence::{looks_like_oom, read_oom};
use ledger::Bytes;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

fn samples() -> Vec<Value> {
    let lines = include_str!("../../../tests/truth/oom/samples.jsonl").lines();
    lines.map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn sample(id: &str) -> String {
    samples().iter().find(|sample| sample["id"] == id).unwrap()["text"].as_str().unwrap().to_owned()
}

fn only(text: &str) -> Message {
    assert!(looks_like_oom(text), "{text}");
    let mut messages = read_oom(text.as_bytes());
    assert_eq!(messages.len(), 1, "{messages:#?}");
    messages.remove(0)
}

/// What a message says, under the names of the samples.
fn said(message: &Message) -> Map<String, Value> {
    let instant = &message.instant;
    let needs = message.needs.unwrap_or_default();
    let mut said = Map::new();
    let mut tell = |name: &str, value: Value| {
        if !value.is_null() {
            said.insert(name.into(), value);
        }
    };
    let bytes = |bytes: Option<Bytes>| json!(bytes.map(Bytes::get));
    tell("backend", json!(instant.backend));
    tell("family", json!(message.family.as_str()));
    tell("device", json!(instant.device));
    tell("free", json!(instant.free));
    tell("own_process_guess", json!(message.own_process_guess));
    for (name, amount) in [
        ("requested", instant.requested),
        ("total", instant.capacity),
        ("allocated", instant.allocated),
        ("active", instant.active),
        ("reserved", instant.reserved),
        ("cached", instant.unallocated),
        ("reserved_unallocated", instant.unallocated),
        ("private_pools", instant.private_pools),
        ("allowed", instant.allowed),
        ("this_process", instant.process),
        ("other", message.other),
        ("parameters", needs.parameters),
        ("constants", needs.constants),
        ("outputs", needs.outputs),
        ("temp", needs.temporaries),
        ("total_needed", needs.total),
        ("fragmentation", needs.fragmentation),
    ] {
        tell(name, bytes(amount));
    }
    let processes = instant.processes.iter();
    let processes: Map<String, Value> =
        processes.map(|process| (process.pid.to_string(), bytes(process.bytes))).collect();
    tell("other_processes", Value::Object(processes));
    if !message.warnings.is_empty() {
        let warnings: Vec<String> = message.warnings.iter().map(ToString::to_string).collect();
        tell("warnings", json!(warnings));
    }
    said
}

/// Fields of the samples that are told of every message or undone elsewhere.
const ELSEWHERE: [&str; 1] = ["tensor_bytes_range"];

#[test]
fn samples_say_what_is_known_of_them() {
    for sample in samples() {
        let id = &sample["id"];
        let said = said(&only(sample["text"].as_str().unwrap()));
        let known = sample["parsed"].as_object().unwrap();
        for (name, value) in known.iter().filter(|(name, _)| !ELSEWHERE.contains(&name.as_str())) {
            assert_eq!(said.get(name), Some(value), "{id}: {name}");
        }
        // What the message does not say is not known.
        let derived = ["cached", "reserved_unallocated", "other_processes", "device"];
        for name in said.keys().filter(|name| !derived.contains(&name.as_str())) {
            assert!(known.contains_key(name), "{id}: {name} is {}", said[name]);
        }
    }
}

#[test]
fn prefixes_boxes_and_broken_lines_change_nothing() {
    for sample in samples() {
        // The prefixes here are ours.
        let text = sample["text"].as_str().unwrap();
        let text = text.trim_start_matches("[rank0]: ").trim_start_matches("(Runner pid=4321) ");
        let plain = said(&only(text));
        let words: Vec<char> = text.chars().collect();
        for width in [13, 80] {
            let lines: Vec<String> =
                words.chunks(width).map(|line| line.iter().collect::<String>().replace('\n', " ")).collect();
            let with = |before: &str, after: &str| {
                let lines = lines.iter().map(|line| format!("{before}{line}{after}\n"));
                lines.collect::<String>()
            };
            for log in [
                with("", ""),
                with("[rank3]: ", ""),
                with("(Worker pid=77, ip=10.0.0.1) ", ""),
                with("node-12: ", ""),
                with("2026-01-02 03:04:05,678 ", ""),
                with("│ ", " │"),
                with("[1,5]<stderr>:", ""),
            ] {
                assert_eq!(said(&only(&log)), plain, "{log}");
            }
        }
    }
}

#[test]
fn ranks_that_write_at_once_are_told_apart() {
    let (one, two) = (sample("capacity_nohint").replace("[rank0]: ", ""), sample("hip_new"));
    let lines = |text: &str| -> Vec<String> {
        let letters: Vec<char> = text.chars().collect();
        letters.chunks(30).map(|line| line.iter().collect()).collect()
    };
    let mut log = "Traceback (most recent call last):\n".to_owned();
    let (one, two) = (lines(&one), lines(&two));
    for index in 0..one.len().max(two.len()) {
        for (rank, lines) in [(0, &one), (1, &two)] {
            if let Some(line) = lines.get(index) {
                log.push_str(&format!("[rank{rank}]: {line}\n"));
            }
        }
    }
    let messages = read_oom(log.as_bytes());
    assert_eq!(messages.iter().map(|message| message.rank).collect::<Vec<_>>(), [Some(0), Some(1)]);
    assert_eq!(said(&messages[0]), said(&only(&sample("capacity_nohint"))));
    assert_eq!(said(&messages[1]), said(&only(&sample("hip_new"))));
    assert_eq!((messages[0].line, messages[1].line), (2, 3));
}

#[test]
fn all_samples_in_one_log_are_found_in_order() {
    let log: String =
        samples().iter().map(|sample| format!("{}\n", sample["text"].as_str().unwrap())).collect();
    let found: Vec<Map<String, Value>> = read_oom(log.as_bytes()).iter().map(said).collect();
    let each: Vec<Map<String, Value>> =
        samples().iter().map(|sample| said(&only(sample["text"].as_str().unwrap()))).collect();
    assert_eq!(found, each);
}

#[test]
fn a_process_that_is_one_of_several_is_not_guessed() {
    let text =
        sample("capacty").replace("Process 4000", "Process 7 has 39.52 GiB memory in use. Process 4000");
    assert_eq!(only(&text).own_process_guess, None);
}

#[test]
fn the_stack_before_a_message_is_its_own() {
    let log = format!(
        "[rank1]: Traceback (most recent call last):\n[rank1]:   File \"train.py\", line 7, in <module>\n[rank1]:     step()\n\
         [rank0]: Traceback (most recent call last):\n[rank0]:   File \"train.py\", line 9, in main\n[rank0]:     loss.backward()\n[rank0]:     ^^^^\n\
         [rank0]:   File \"/lib/torch/_tensor.py\", line 581, in backward\n{}\n[rank1]: {}\n",
        sample("capacity_nohint"),
        sample("reserved")
    );
    let messages = read_oom(log.as_bytes());
    let stack = |index: usize| -> Vec<(String, Option<String>)> {
        let frames = messages[index].stack.iter();
        frames.map(|frame| (frame.function.clone(), frame.code.clone())).collect()
    };
    assert_eq!(stack(0), [("main".into(), Some("loss.backward()".into())), ("backward".into(), None)]);
    assert_eq!(stack(1), [("<module>".into(), Some("step()".into()))]);
}

#[test]
fn forms_without_a_sample_are_known() {
    let told = |text: &str| said(&only(text));
    let expect = |text: &str, known: Value| {
        let said = told(text);
        for (name, value) in known.as_object().unwrap() {
            assert_eq!(said.get(name), Some(value), "{text}: {name}: {said:?}");
        }
    };
    expect(
        "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be reported later",
        json!({"backend": "cuda", "family": "bare"}),
    );
    expect("RuntimeError: HIP error: out of memory", json!({"backend": "hip", "family": "bare"}));
    expect(
        "NPU out of memory. NPUWorkspaceAllocator tried to allocate 180.00 MiB(NPU 1; 60.96 GiB total capacity; 86.81 MiB free).",
        json!({"backend": "npu", "family": "paren", "device": 1, "requested": 188_743_680, "free": 91_026_883}),
    );
    expect(
        "XPU out of memory. Tried to allocate 192.00 MiB. GPU 3 has a total capacity of 31.89 GiB of which 13.22 GiB is free.",
        json!({"backend": "xpu", "family": "sentence", "device": 3, "requested": 201_326_592, "total": 34_241_626_767_u64}),
    );
    expect(
        "MPS backend out of memory (MPS allocated: 7.64 GiB, other allocations: 68.91 GiB, max allowed: 88.13 GiB). Tried to allocate 33.92 GiB on private pool.",
        json!({"backend": "mps", "allocated": 8_203_387_535_u64, "requested": 36_421_322_670_u64}),
    );
    expect(
        "[metal::malloc] Attempting to allocate 29253632000 bytes which is greater than the maximum allowed buffer size of 17179869184 bytes.",
        json!({"backend": "mlx", "requested": 29_253_632_000_u64, "allowed": 17_179_869_184_u64}),
    );
    expect(
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 17.31G of 15.48G hbm. Exceeded hbm capacity by 1.83G.",
        json!({"backend": "jax", "family": "xla", "total": 16_621_523_436_u64, "total_needed": 18_586_470_973_u64}),
    );
    expect(
        "ResourceExhaustedError: OOM when allocating tensor with shape[256,1024,7] and type float on /job:localhost/replica:0/task:0/device:GPU:1 by allocator GPU_1_bfc",
        json!({"backend": "xla/tf", "requested": 7_340_032, "device": 1}),
    );
    expect(
        "failed to allocate 2.20G (2362232064 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        json!({"backend": "xla/tf", "requested": 2_362_232_064_u64}),
    );
    expect(
        "RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at \"../c10/cuda/CUDACachingAllocator.cpp\":838",
        json!({"family": "masked"}),
    );
    expect("Last error:\nFailed to CUDA calloc async 4 bytes", json!({"backend": "nccl", "requested": 4}));
}

#[test]
fn a_file_that_is_none_has_no_message() {
    for text in [
        "",
        "step 1 loss 2.0",
        "try:\n    f()\nexcept RuntimeError as e:\n    if 'out of memory' in str(e): raise",
    ] {
        assert!(read_oom(text.as_bytes()).is_empty(), "{text}");
    }
}

proptest! {
    #[test]
    fn whatever_follows_a_message_ends_in_an_answer(
        pieces in prop::collection::vec(prop_oneof![
            Just("CUDA out of memory. Tried to allocate ".to_owned()),
            Just("99999999999999999999999999999.99 GiB".to_owned()),
            Just("[rank99999]: ".to_owned()),
            Just("(GPU 0; 7.79 GiB total capacity; 1 GiB already allocated; ".to_owned()),
            Just("Process 99999999999999999999 has 17179869184.00 GiB memory in use.".to_owned()),
            Just("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes".to_owned()),
            Just("\n".to_owned()),
            "\\PC{0,12}",
        ], 0..40),
    ) {
        for message in read_oom(pieces.concat().as_bytes()) {
            let instant = &message.instant;
            prop_assert!(message.line >= 1);
            prop_assert!(instant.requested <= Some(Bytes::MAX));
        }
    }

    #[test]
    fn any_bytes_end_in_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let text = [b"CUDA out of memory. Tried to allocate 2.00 GiB (".as_slice(), &bytes].concat();
        prop_assert!(!read_oom(&text).is_empty());
    }
}
