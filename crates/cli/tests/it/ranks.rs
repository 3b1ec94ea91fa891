//! `plan --parallel`: what ranks hold, and which settings of them rule each other out.

use crate::run::{Folder, run};

#[test]
fn what_streams_keep_apart_is_told() {
    let answer = run(
        "plan llama-3-8b --dtype fp32 --checkpoint full --parallel fsdp2 --world-size 8 --mp-param-dtype bf16 --mp-reduce-dtype fp32",
    );
    assert_eq!(answer.exit, Some(0), "{}", answer.stderr);
    let page = answer.stdout.replace('\n', " ");
    assert!(page.contains("on one stream 26.91 GiB would be reserved, 1.97 less"), "{page}");
    let alone = run("plan gpt2");
    assert_eq!(alone.exit, Some(0), "{}", alone.stderr);
    assert!(!alone.stdout.contains("on one stream"), "{}", alone.stdout);
}

#[test]
fn settings_of_ranks_that_rule_each_other_out_are_refused() {
    for (settings, sentence) in [
        ("--parallel fsdp2 --world-size 3 --rank 3", "ranks count from 0, and `--world-size` is 3"),
        ("--world-size 2 --rank 1", "it needs `--parallel`"),
        (
            "--parallel hsdp --world-size 8 --shard-size 3",
            "8 ranks of `--world-size` are not a multiple of it",
        ),
        ("--parallel hsdp --world-size 8", "needs `--shard-size`"),
        ("--parallel fsdp2 --world-size 8 --reshard-after-forward 3", "a divisor of the 8 ranks"),
        (
            "--parallel fsdp2 --shard-size 2 --world-size 4",
            "`--shard-size` is of hsdp, and `--parallel` is fsdp2",
        ),
        ("--parallel ddp --world-size 1048577", "at most 1048576 ranks are planned"),
        ("--parallel megatron-do --world-size 0", "it must be at least 1"),
        ("--parallel megatron-do --world-size 2 --rank -1", "invalid value '-1' for '--rank"),
        ("--parallel megatron-do --optimizer sgd", "the distributed optimizer is of adam and adamw"),
        ("--parallel megatron-do --optimizer-impl for-loop", "or is fused"),
        ("--parallel megatron-do --master-weights --dtype bf16", "it has fp32 copies of its own"),
        ("--parallel megatron-do --zero-grad keep", "its buffer of gradients is kept"),
        ("--parallel megatron-do --bucket-size 4", "it needs `--overlap-grad-reduce`"),
        ("--parallel zero2 --optimizer muon", "the optimizer of a flat partition is"),
        ("--parallel zero1 --offload parameters", "is of zero3"),
        ("--parallel zero3 --world-size 20000", "at most 16384 ranks"),
        ("--parallel zero2 --world-size 2 --overlap-comm --no-overlap-comm", "cannot be used with"),
        ("--parallel zero2 --prefetch-bucket-size 5", "`--prefetch-bucket-size` is of zero3"),
        ("--parallel zero3 --round-robin-gradients", "is of zero1 or zero2"),
        ("--parallel zero2 --reduce-bucket-size 0", "it must be at least 1"),
        ("--reduce-bucket-size 5", "it needs `--parallel"),
        ("--parallel ddp --offload optimizer", "an optimizer on the host"),
        ("--mp-param-dtype bf16", "it needs `--parallel"),
        ("--parallel fsdp2 --world-size 8 --optimizer muon", "the optimizer of shards is"),
        (
            "--parallel fsdp2 --world-size 8 --optimizer sgd --optimizer-impl fused",
            "adam and adamw on shards",
        ),
    ] {
        let answer = run(&format!("plan gpt2 {settings}"));
        assert_eq!((answer.exit, answer.stdout.as_str()), (Some(2), ""), "{settings}");
        assert!(answer.stderr.contains(sentence), "{settings}: {}", answer.stderr);
    }
}

/// Every option is of some frameworks: with another one, or with none, it is refused in one sentence that names it,
/// from a setup file too.
#[test]
fn options_of_another_framework_are_refused() {
    let options: [(&str, &str, &[&str]); 17] = [
        ("no-sync", "", &["ddp", "fsdp2"]),
        ("gradient-as-bucket-view", "", &["ddp"]),
        ("bucket-cap-mb", "1", &["ddp"]),
        ("no-init-sync", "", &["ddp"]),
        ("find-unused-parameters", "", &["ddp"]),
        ("lazy-bucket-allocation", "", &["ddp"]),
        ("shard-size", "2", &[]),
        ("reshard-after-forward", "true", &["fsdp2"]),
        ("root-reshard-after-forward", "true", &["fsdp2"]),
        ("mp-param-dtype", "bf16", &["fsdp2"]),
        ("mp-reduce-dtype", "fp32", &["fsdp2"]),
        ("reduce-bucket-size", "1000", &["zero1", "zero2", "zero3"]),
        ("no-contiguous-gradients", "", &["zero1", "zero2", "zero3"]),
        ("round-robin-gradients", "", &["zero1", "zero2"]),
        ("param-persistence-threshold", "10", &["zero3"]),
        ("grad-reduce-in-fp32", "true", &["megatron-do"]),
        ("overlap-grad-reduce", "", &["megatron-do"]),
    ];
    for (option, value, kinds) in options {
        let flag = format!("--{option} {value}");
        for kind in ["ddp", "fsdp2", "zero1", "zero2", "zero3", "megatron-do"] {
            let line = format!("plan mlp:2x8 --world-size 4 --parallel {kind} {flag}");
            let answer = run(&line);
            if kinds.contains(&kind) {
                assert_eq!(answer.exit, Some(0), "{line}: {}", answer.stderr);
            } else {
                let sentence = answer.sentence();
                assert!(sentence.starts_with(&format!("`--{option}` is of ")), "{line}: {sentence}");
                assert!(sentence.ends_with(&format!("and `--parallel` is {kind}")), "{line}: {sentence}");
            }
        }
        let none = run(&format!("plan mlp:2x8 {flag}"));
        assert!(none.sentence().contains("it needs `--parallel"), "{option}: {}", none.stderr);
    }
    let file = Folder::new()
        .with("ranks.toml", "parallel = \"zero1\"\nworld-size = 4\noverlap-grad-reduce = true\n");
    let answer = file.run("plan mlp:2x8 --setup ranks.toml");
    assert_eq!(answer.exit, Some(2), "{}", answer.stderr);
    assert!(answer.stderr.contains("`--overlap-grad-reduce` is of megatron-do"), "{}", answer.stderr);
}

/// Any rank of any number of ranks is planned, padding alone or not.
#[test]
fn every_kind_is_planned_from_the_command_line() {
    for kind in ["ddp", "fsdp2", "hsdp --shard-size 2", "zero1", "zero2", "zero3", "megatron-do"] {
        for ranks in ["2 --rank 1", "6 --rank 5", "1024 --rank 1023"] {
            let line = format!("plan mlp:3x8 --parallel {kind} --world-size {ranks} --format json");
            let ledger = run(&line).json();
            assert_eq!(ledger["fits"], true, "{line}");
            assert_eq!(ledger["subject"]["setup"]["parallel"]["kind"], kind.split(' ').next().unwrap());
        }
    }
}

/// An optimizer's temporary on the flat partition of ZeRO-2: LLaMA-7B in fp16 on eight cards of 31.75 GiB.
#[test]
fn zero_2_fails_for_a_temporary_of_one_partition() {
    let line = "plan llama-2-7b --dtype fp16 --batch 1 --seq 512 --optimizer adamw --optimizer-impl for-loop \
                --parallel zero2 --world-size 8 --gpu V100-32GB --capacity 31.75GiB --format json";
    let answer = run(line);
    assert_eq!(answer.exit, Some(1), "{}", answer.stderr);
    let ledger = answer.json();
    let oom = &ledger["oom"];
    let partition = 6_738_415_616_u64 / 8 * 4;
    assert_eq!(
        (oom["phase"].as_str(), oom["requested_bytes"].as_u64()),
        (Some("update"), Some(3_369_207_808))
    );
    assert_eq!(partition, 3_369_207_808);
    let held = oom["held"]["allocated_bytes"].as_u64().unwrap();
    assert_eq!(format!("{:.2}", held as f64 / f64::from(1 << 30)), "28.24");
    let holders = oom["holders"].as_array().unwrap();
    let bytes: Vec<u64> = holders.iter().map(|row| row["bytes"].as_u64().unwrap()).collect();
    assert_eq!(bytes[..6], [2 * 6_738_415_616, partition, partition, partition, partition, partition]);
}

#[test]
fn a_page_tells_what_one_rank_holds_and_what_ranks_do_in_a_step() {
    let told = |settings: &str, sentences: &str| {
        let answer = run(&format!("plan gpt2 --batch 1 --seq 256 --world-size 8 {settings}"));
        assert_eq!(answer.exit, Some(0), "{settings}: {}", answer.stderr);
        let page = answer.stdout.split_whitespace().collect::<Vec<_>>().join(" ").replace("- ", "-");
        assert!(page.contains(sentences), "{settings}: {page}");
    };
    told(
        "--parallel ddp --rank 3",
        "Rank 3 of 8 (ddp) holds 474.70 MiB of weights (all), 474.70 MiB of gradients (all) and 949.40 MiB of optimizer state (all). Communication buffers and gathered weights hold 474.70 MiB at most (forward), all of them all the time. A step: 13 all-reduces over 474.70 MiB and 2,048 tokens.",
    );
    told(
        "--parallel fsdp2 --offload parameters",
        "of weights on the host (1/8), 59.34 MiB of gradients on the host (1/8)",
    );
}

#[test]
fn how_ranks_divide_the_work_can_be_varied() {
    let answer = run(
        "plan gpt2 --batch 1 --seq 64 --steps 2 --format csv --vary parallel=ddp,fsdp2 --vary world-size=2,4 --vary no-sync=false",
    );
    assert_eq!(answer.exit, Some(0), "{}", answer.stderr);
    let mut lines = answer.stdout.lines();
    let column = |line: &str, name: &str, head: &str| {
        let at = head.split(',').position(|key| key == name).unwrap();
        line.split(',').nth(at).unwrap().parse::<u64>().unwrap()
    };
    let head = lines.next().unwrap();
    let peaks: Vec<u64> = lines.clone().map(|line| column(line, "peak_requested_bytes", head)).collect();
    // All of the state on each rank of DDP, a part of it on each of FSDP2.
    assert!(peaks[0] == peaks[1] && peaks[1] > peaks[2] && peaks[2] > peaks[3], "{peaks:?}");
    assert!(lines.all(|line| column(line, "collective_bytes", head) > 0), "{}", answer.stdout);
}

#[test]
fn buckets_that_make_the_peak_are_named_among_what_would_change_it() {
    let answer = run("plan mlp:8x2048 --batch 8 --parallel ddp --world-size 8 --optimizer sgd");
    assert_eq!(answer.exit, Some(0), "{}", answer.stderr);
    assert!(answer.stdout.contains("--gradient-as-bucket-view"), "{}", answer.stdout);
}
