//! `plan --parallel`: what ranks hold, and which settings of them rule each other out.

use crate::run::run;

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
