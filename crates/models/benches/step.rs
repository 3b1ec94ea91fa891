//! Events per second of training steps on shapes, and of the replay of their tapes.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ledger::Dtype;
use models::{GPUS, Model, PRESETS, Setup};

/// What `plan MODEL --seq 4096 --dtype bf16` runs: three steps on the first card of the catalogue.
fn setup() -> Setup {
    Setup { seqs: vec![4096], dtype: Some(Dtype::Bf16), ..Setup::default() }
}

fn step(criterion: &mut Criterion) {
    for name in ["llama-3-8b", "llama-3.1-405b"] {
        let preset = PRESETS.iter().find(|preset| preset.name == name).expect("a preset");
        let model = Model::from_config(preset.config).expect("a config of a known model");
        let train = || model.train(&setup(), &GPUS[0]).expect("a setup within range");
        let tape = train().tape;
        let throughput = Throughput::Elements(tape.len() as u64);

        let mut engine = criterion.benchmark_group("engine");
        engine.sample_size(20).throughput(throughput.clone());
        engine
            .bench_function(BenchmarkId::from_parameter(name), |bencher| bencher.iter_with_large_drop(train));
        engine.finish();

        let mut replay = criterion.benchmark_group("replay");
        replay.sample_size(20).throughput(throughput);
        replay.bench_function(BenchmarkId::from_parameter(name), |bencher| {
            bencher.iter_with_large_drop(|| ledger::replay(black_box(&tape), None));
        });
        replay.finish();
    }
}

criterion_group!(benches, step);
criterion_main!(benches);
