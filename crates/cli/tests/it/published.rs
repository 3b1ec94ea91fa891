//! Peaks that others have published, met within a tenth: indications, for their software and their batches differ.

use crate::run::run;

const GIB: f64 = (1_u64 << 30) as f64;

/// Full fine-tuning of Llama-2-7B in bf16, from the table of torchao's low-bit optimizers.
#[test]
fn torchaos_low_bit_optimizers() {
    for (optimizer, published) in
        [("adamw --optimizer-impl fused", 51.6), ("adamw8bit", 39.1), ("adamw4bit", 33.2)]
    {
        let line = "plan llama-2-7b --gpu A100-80GB --dtype bf16 --batch 1 --seq 2048 --checkpoint full --format json";
        let ledger = run(&format!("{line} --optimizer {optimizer}")).json();
        let peak = ledger["peaks"]["allocated"]["bytes"].as_f64().unwrap() / GIB;
        assert!((peak / published - 1.0).abs() < 0.1, "{optimizer}: {peak} GiB, published {published}");
    }
}
