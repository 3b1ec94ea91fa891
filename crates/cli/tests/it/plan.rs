//! `plan`: what it reads, what it refuses, what it keeps.

use serde_json::{Value, json};

use crate::run::{Folder, run};

#[test]
fn the_first_command_of_the_readme_answers() {
    let answer = run("plan llama-3-8b --gpu H100-80GB --batch 1 --seq 4096 --dtype bf16 --optimizer adamw");
    assert_eq!(answer.exit, Some(0), "{}", answer.stderr);
    assert!(answer.stdout.starts_with("llama-3-8b fits on H100-80GB: "), "{}", answer.stdout);
    let lines: Vec<&str> = answer.stdout.lines().collect();
    assert!(lines.len() <= 50, "{} lines", lines.len());
    assert!(lines.iter().all(|line| line.chars().count() <= 100));
}

#[test]
fn a_ledger_says_what_it_is_of() {
    let ledger = run(
        "plan gpt2 --seq 64 --capacity 16GiB --context 1GiB --torch 2.11 --alloc-conf expandable_segments:True --format json",
    );
    let ledger = ledger.json();
    assert_eq!(ledger["format"], "vramledger/1");
    assert_eq!(ledger["provenance"], "estimated");
    let model = &ledger["subject"]["model"];
    assert_eq!((&model["name"], &model["family"]), (&json!("gpt2"), &json!("gpt2")));
    assert_eq!(model["config"]["model_type"], "gpt2");
    assert_eq!(ledger["subject"]["software"]["torch"], "2.11");
    assert_eq!(ledger["subject"]["setup"]["seqs"], json!([64]));
    assert_eq!(ledger["subject"]["setup"]["alloc_conf"], "expandable_segments:True");
    assert_eq!(
        ledger["devices"],
        json!([{ "name": "H100-80GB", "kind": "gpu", "capacity_bytes": 16_u64 << 30, "context_bytes": 1 << 30 }])
    );
    assert_eq!(ledger["parameters"]["total"], 124_439_808);
    assert_eq!((&ledger["fits"], &ledger["oom"]), (&json!(true), &Value::Null));
    let peaks =
        ["requested", "allocated", "reserved"].map(|measure| ledger["peaks"][measure]["bytes"].as_u64());
    assert!(peaks[0] <= peaks[1] && peaks[1] <= peaks[2] && peaks[0].is_some(), "{peaks:?}");
    let limits = ledger["interpretation_limits"].as_array().unwrap();
    assert!(!limits.is_empty());
}

#[test]
fn a_run_that_does_not_fit_ends_with_1_and_prints_its_ledger_all_the_same() {
    let answer = run("plan gpt2 --seq 256 --capacity 2GiB --format json");
    assert_eq!(answer.exit, Some(1));
    let ledger = answer.json();
    assert_eq!((&ledger["fits"], &ledger["oom"]["phase"]), (&json!(false), &json!("update")));
    assert!(ledger["headroom_bytes"].as_i64().unwrap() < 0);
    // What was asked for, what there was and who held it.
    let oom = &ledger["oom"];
    let bytes = |name: &str| oom[name].as_u64().unwrap();
    assert!(bytes("requested_bytes") <= bytes("rounded_bytes"));
    assert!(bytes("rounded_bytes") <= bytes("device_request_bytes"));
    assert!(bytes("largest_free_block_bytes") < bytes("rounded_bytes"));
    assert!(bytes("device_free_bytes") < bytes("device_request_bytes"));
    assert!(oom["object"].as_str().unwrap().ends_with("exp_avg_sq"));
    let held = |measure: &str| oom["held"][measure].as_u64().unwrap();
    let holders = oom["holders"].as_array().unwrap();
    let sum: u64 = holders.iter().map(|row| row["bytes"].as_u64().unwrap()).sum();
    assert_eq!(sum, held("allocated_bytes"));
    let largest: Vec<u64> = holders.iter().map(|row| row["bytes"].as_u64().unwrap()).collect();
    assert!(largest.is_sorted_by(|a, b| a >= b), "{largest:?}");
    assert_eq!(held("process_bytes"), held("reserved_bytes") + (550 << 20));
    assert_eq!(
        (held("device_bytes"), held("device_bytes") - held("process_bytes")),
        (2 << 30, bytes("device_free_bytes"))
    );
}

#[test]
fn what_lies_outside_the_allocator_is_a_row_with_its_assumption() {
    let ledger = run("plan mlp:2x64 --context 700MiB --format json").json();
    let outside = &ledger["outside"];
    assert_eq!(
        (&outside[0]["device"], &outside[0]["name"], &outside[0]["bytes"]),
        (&json!(0), &json!("CUDA context"), &json!(700 << 20))
    );
    assert!(outside[0]["assumption"].is_string());
    let ladder = &ledger["peaks"]["reserved"]["at_peak"];
    let rungs = ["requested", "allocated", "active", "reserved", "process", "device"];
    let rungs = rungs.map(|measure| ladder[format!("{measure}_bytes")].as_u64().unwrap());
    assert!(rungs.is_sorted(), "{rungs:?}");
    assert_eq!(rungs[4], rungs[3] + (700 << 20));
}

#[test]
fn the_rows_of_a_peak_sum_to_it() {
    let ledger = run("plan gpt2 --seq 64 --autocast bf16 --format json").json();
    let peak = &ledger["peaks"]["requested"];
    let rows = peak["contributors"].as_array().unwrap().iter();
    let sum: u64 = rows.map(|row| row["bytes"].as_u64().unwrap()).sum();
    assert_eq!(sum, peak["bytes"].as_u64().unwrap());
}

#[test]
fn a_setup_file_has_the_flags_as_keys_and_a_flag_wins() {
    let setup = r#"
        batch = 4
        seqs = [32, 64]
        optimizer = "sgd"
        momentum = 0.9
        capacity = "24GiB"
        keep-outputs = true
    "#;
    let folder = Folder::new().with("setup.toml", setup);
    let of = |flags: &str| folder.run(&format!("plan gpt2 --setup setup.toml {flags} --format json")).json();
    let by_flags = run(
        "plan gpt2 --batch 4 --seqs 32,64 --optimizer sgd --momentum 0.9 --capacity 24GiB --keep-outputs --format json",
    );
    assert_eq!(of(""), by_flags.json());
    let setup = &of("--batch 2 --seq 16")["subject"]["setup"];
    assert_eq!(
        (&setup["batch"], &setup["seqs"], &setup["optimizer"]),
        (&json!(2), &json!([16]), &json!("sgd"))
    );
}

#[test]
fn a_setup_file_with_an_unknown_key_or_a_wrong_value_is_refused() {
    let refused = |setup: &str| {
        let answer = Folder::new().with("setup.toml", setup).run("plan gpt2 --setup setup.toml --quiet");
        assert_eq!((answer.exit, answer.stdout.as_str()), (Some(2), ""), "{setup}");
        answer.stderr
    };
    assert!(
        refused("bach = 4").starts_with(
            "error: `bach` in line 1 of `setup.toml` is an unknown key; the keys are accumulate,"
        )
    );
    assert!(refused("batch = 0").contains("it must be at least 1"));
    assert!(refused("batch = [1, 2]").contains("--batch"));
    assert!(refused("optimizer = \"nix\"").contains("'nix'"));
    assert!(refused("batch = { a = 1 }").contains("a text or a number"));
    assert!(refused("\nmodel = \"gpt2\"").contains("`model` in line 2 of `setup.toml` is an unknown key"));
    assert!(refused("\nsteps = 1\nbatch = 0").starts_with("error: `batch` in line 3 of `setup.toml`"));
    refused("batch = ");
}

#[test]
fn settings_that_rule_each_other_out_are_named_with_their_places() {
    for (setup, sentence) in [
        ("--optimizer sgd --nesterov", "`--nesterov` needs `--momentum` above 0"),
        ("--nesterov --momentum 0.9", "`--nesterov` is of sgd, not of adamw"),
        ("--optimizer sgd --amsgrad", "`--amsgrad` is of adam and adamw, not of sgd"),
        ("--optimizer sgd --capturable", "`--capturable` is of adam, adamw and rmsprop, not of sgd"),
        (
            "--optimizer rmsprop --optimizer-impl fused",
            "`--optimizer-impl fused`: rmsprop is foreach or for-loop",
        ),
        (
            "--checkpoint layers:12",
            "`--checkpoint layers:12`: there is no layer 12, the model has 12 from 0 on",
        ),
        (
            "--checkpoint segments:6,7",
            "`--checkpoint segments:6,7`: these are 13 layers, and the model has 12",
        ),
        ("--checkpoint-reentrant", "`--checkpoint-reentrant` needs a `--checkpoint` other than none"),
        (
            "--checkpoint selective:mm --checkpoint-reentrant",
            "`--checkpoint-reentrant`: a selective checkpoint is not reentrant",
        ),
        (
            "--optimizer-in-backward --accumulate 2",
            "`--accumulate`: an update in backward lets go of each gradient as soon as it is there",
        ),
        ("--offload checkpoints", "`--offload checkpoints` needs a `--checkpoint` other than none"),
        ("--offload activations,activations-pinned", "`--offload` has activations either pinned or not"),
        (
            "--offload optimizer --optimizer-impl fused",
            "`--offload optimizer`: the host has no `--optimizer-impl`",
        ),
        ("--optimizer muon --torch 2.11", "`--optimizer muon` is that of torch 2.15"),
        (
            "--offload parameters,optimizer",
            "`--offload parameters`: parameters have their optimizer with them",
        ),
        (
            "--offload parameters --optimizer muon",
            "`--offload parameters`: the optimizer is sgd, adam, adamw, rmsprop or adagrad",
        ),
        ("--weight-decay -1", "`--weight-decay` must be 0 or more, not -1"),
    ] {
        assert_eq!(run(&format!("plan gpt2 --seq 16 {setup}")).sentence(), sentence);
    }
    let folder = Folder::new().with("setup.toml", "optimizer = \"sgd\"\n# ahead\nnesterov = true\n");
    assert_eq!(
        folder.run("plan gpt2 --setup setup.toml").sentence(),
        "`--nesterov` needs `--momentum` above 0 (`nesterov` in line 3 of `setup.toml`)"
    );
    assert_eq!(
        folder.run("plan gpt2 --setup setup.toml --optimizer adam").sentence(),
        "`--nesterov` is of sgd, not of adam (`nesterov` in line 3 of `setup.toml`)"
    );
}

#[test]
fn adapters_without_a_rank_or_a_layer_are_refused() {
    let folder =
        Folder::new().with("setup.toml", "# adapters\nlora-targets = [\"q_proj\", \"c_attn\"]\nseq = 64\n");
    let refused = |flags: &str| folder.run(&format!("plan llama-3-8b {flags}")).sentence().to_owned();
    assert_eq!(
        refused("--setup setup.toml"),
        "`--lora-targets` is of adapters: it needs `--lora-rank` (`lora-targets` in line 2 of `setup.toml`)"
    );
    assert_eq!(
        refused("--setup setup.toml --lora-targets q_proj"),
        "`--lora-targets` is of adapters: it needs `--lora-rank`"
    );
    assert_eq!(
        refused("--setup setup.toml --lora-rank 8"),
        "`llama-3-8b`: `--lora-targets` names `c_attn`, which is no linear layer of the model (`lora-targets` in line 2 of `setup.toml`)"
    );
    assert_eq!(
        refused("--lora-rank 8 --lora-dropout 1"),
        "`--lora-dropout` must be 0 or more and less than 1, not 1"
    );
}

#[test]
fn weights_that_cannot_be_frozen_so_are_refused() {
    for (question, sentence) in [
        ("gpt2 --quantize nf4", "`--quantize` needs `--lora-rank`: weights of 4 bits are not trained"),
        ("gpt2 --prepare-kbit", "`--prepare-kbit` is of weights of 4 bits: it needs `--quantize`"),
        ("mlp:4x64 --quantize nf4 --lora-rank 2", "`--quantize` is of models of transformers, not of an mlp"),
        (
            "gpt2 --lora-rank 2 --freeze wte",
            "`--freeze`: with `--lora-rank` everything but the adapters is frozen",
        ),
        (
            "gpt2 --seq 8 --freeze q_proj",
            "`gpt2`: `--freeze` names `q_proj`, which is no parameter of the model",
        ),
        ("gpt2 --seq 8 --freeze transformer", "`gpt2`: `--freeze` leaves nothing to train"),
    ] {
        assert_eq!(run(&format!("plan {question}")).sentence(), sentence);
    }
}

#[test]
fn frozen_weights_have_no_gradient_and_no_state() {
    let of = |flags: &str| {
        let ledger = run(&format!("plan gpt2 --seq 32 {flags} --format json")).json();
        let row = ledger["phases"].as_array().unwrap().last().unwrap()["end_by_category"].clone();
        (ledger["parameters"].clone(), row)
    };
    let (all, states) = of("");
    let (some, frozen_states) = of("--freeze wte,wpe,h.0");
    assert_eq!(all["total"], some["total"]);
    let frozen = 768 * (50257 + 1024) + 7_087_872;
    assert_eq!(some["trainable"].as_u64().unwrap(), all["trainable"].as_u64().unwrap() - frozen);
    let state = |row: &serde_json::Value| row["optimizer_state"].as_u64().unwrap();
    assert_eq!(state(&states) - state(&frozen_states), 8 * frozen);
}

#[test]
fn master_weights_make_the_recipe_of_sixteen_bytes() {
    let ledger =
        run("plan gpt2 --seq 32 --dtype bf16 --master-weights --zero-grad keep --format json").json();
    let row = &ledger["phases"].as_array().unwrap().last().unwrap()["end_by_category"];
    let parameters = ledger["parameters"]["total"].as_u64().unwrap();
    let a_parameter = |category: &str| row[category].as_u64().unwrap() as f64 / parameters as f64;
    let recipe = ["parameter", "gradient", "master_weight", "optimizer_state"].map(a_parameter);
    assert_eq!(recipe, [2.0, 2.0, 4.0, 8.0]);
    assert_eq!(
        run("plan gpt2 --seq 32 --master-weights").sentence(),
        "`--master-weights` is of weights of 16 bits: what is trained is fp32 already"
    );
}

#[test]
fn four_bit_weights_are_counted_by_their_elements() {
    let of = |form: &str| {
        let flags = "--seq 64 --dtype bf16 --lora-rank 8 --format json";
        run(&format!("plan llama-3-8b {flags} {form}")).json()
    };
    let (plain, packed) = (of(""), of("--quantize nf4-double"));
    assert_eq!(plain["parameters"]["total"], packed["parameters"]["total"]);
    // Of 16 bits an element, the layers' products keep 4.
    let layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336_u64);
    let bytes = |ledger: &serde_json::Value| ledger["parameters"]["bytes"].as_u64().unwrap();
    assert_eq!(bytes(&plain) - bytes(&packed), layers * 3 / 2);
}

#[test]
fn losses_that_a_run_cannot_have_are_refused() {
    for (question, sentence) in [
        ("mlp:4x64 --loss fused-linear", "`--loss` fused-linear: an mlp has mean-square or sum"),
        (
            "gpt2 --loss sum",
            "`--loss` sum: a language model has default, fp32-logits, chunked:N or fused-linear",
        ),
        (
            "gpt2 --loss chunked:8 --keep-outputs",
            "`--keep-outputs`: with `--loss` chunked:8 there is no output with all logits",
        ),
        (
            "gpt2 --loss fused-linear --lora-rank 4 --lora-targets lm_head",
            "`--loss` fused-linear takes the weight of the head alone, without an adapter on `lm_head`",
        ),
    ] {
        assert_eq!(run(&format!("plan {question}")).sentence(), sentence);
    }
    assert!(run("plan gpt2 --loss chunked:0").sentence().contains("chunked:N"));
}

#[test]
fn a_fused_loss_never_holds_all_logits() {
    let largest = |loss: &str| {
        let ledger = run(&format!("plan gpt2 --seq 512 --batch 4 --loss {loss} --format json")).json();
        let rows = ledger["peaks"]["requested"]["contributors"].as_array().unwrap().clone();
        let logits = rows.iter().filter(|row| row["name"].as_str().unwrap().contains("softmax"));
        logits.map(|row| row["bytes"].as_u64().unwrap()).sum::<u64>()
    };
    let all_logits = 4 * 512 * 50257 * 4;
    assert!(largest("default") >= all_logits);
    assert_eq!(largest("fused-linear"), 0);
}

#[test]
fn adapters_are_what_is_trained() {
    let ledger = run("plan llama-3-8b --seq 64 --dtype bf16 --lora-rank 8 --format json").json();
    // 32 layers of 8 x (4096 + 4096) for queries and 8 x (4096 + 1024) for values, in fp32 beside bf16.
    let (base, adapters) = (8_030_261_248_u64, 32 * 8 * (8192 + 5120));
    let parameters =
        json!({ "total": base + adapters, "trainable": adapters, "bytes": 2 * base + 4 * adapters });
    assert_eq!(ledger["parameters"], parameters);
}

#[test]
fn the_tape_is_kept_and_read_back() {
    let folder = Folder::new();
    let kept = folder.run("plan gpt2 --seq 64 -o run.vlt --format json");
    assert_eq!(folder.files(), ["run.vlt"]);
    assert_eq!(kept.json()["tape"], "run.vlt");
    let peak = kept.json()["peaks"]["requested"]["bytes"].clone();
    std::fs::write(folder.path().join("ledger.json"), &kept.stdout).unwrap();
    let compared = folder.run("compare run.vlt ledger.json --format json").json();
    assert_eq!(compared["baseline"]["peak"]["bytes"], peak);
    assert_eq!(compared["candidates"][0]["saving_bytes"], 0);
}

#[test]
fn a_model_is_a_preset_a_config_a_directory_or_an_mlp() {
    let config = r#"{"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4}"#;
    let folder = Folder::new().with("config.json", config).with("other.json", config);
    let of = |model: &str| folder.run(&format!("plan {model} --seq 16 --format json")).json();
    let (here, file) = (of("."), of("other.json"));
    assert_eq!(here["peaks"], file["peaks"]);
    assert_eq!(run("plan mlp:2x64 --format json").json()["subject"]["model"]["family"], "mlp");
    insta::assert_snapshot!(run("plan lama-3-8b").all(), @r"
    exit 2
    --- stderr
    error: no model is called `lama-3-8b`, and no file either
    hint: did you mean `llama-3-8b` or `llama-3.1-8b` or `llama-3-70b`? a model is a name that `vramledger models` lists, a config.json, a directory that holds one, or mlp:LAYERSxWIDTH
    ");
    assert_eq!(run("plan no/config.json").sentence(), "there is no file `no/config.json`");
}

#[test]
fn absurd_configs_get_one_sentence() {
    let nested = format!("{{\"a\": {}{}}}", "[".repeat(5_000_000), "]".repeat(5_000_000));
    let configs = [
        "",
        "{}",
        "[]",
        "null",
        "{\"model_type\": \"bert\"}",
        "{\"model_type\": \"llama\", \"hidden_size\": \"4096\"}",
        "{\"model_type\": \"llama\", \"hidden_size\": -1}",
        "{\"model_type\": \"llama\", \"hidden_size\": 1e308}",
        "{\"model_type\": \"llama\", \"num_hidden_layers\": 1000000000000}",
        "{\"model_type\": \"gpt2\", \"n_head\": 7}",
        "{\"model_type\": \"gpt2\", \"n_head\": 0}",
        "{\"model_type\": \"llama\", \"hidden_size\": NaN}",
        "{\"model_type\": \"llama\", \"attention_dropout\": NaN}",
        "{\"model_type\": \"llama\", \"num_key_value_heads\": 5}",
        "{\"model_type\": \"llama\", \"vocab_size\": 1000000000000000000}",
        "{\"model_type\": \"llama\", \"vocab_size\": true}",
        "{\"model_type\": [\"llama\"]}",
        "{\"model_type\": \"llama\", \"num_hidden_layers\": 1000000, \"hidden_size\": 64, \"num_attention_heads\": 4}",
        &nested,
    ];
    for config in configs {
        let answer = Folder::new().with("config.json", config).run("plan config.json");
        let start: String = config.chars().take(60).collect();
        assert!(answer.sentence().starts_with("`config.json`: "), "{start}: {}", answer.stderr);
        assert_eq!(answer.stderr.lines().count(), 1, "{start}: {}", answer.stderr);
    }
    let binary = Folder::new().with("config.json", b"\xff\xfe").run("plan config.json");
    assert_eq!(binary.sentence(), "failed to read `config.json`");
}

#[test]
fn absurd_setups_get_one_sentence() {
    for setup in [
        "--batch 0",
        "--batch 1000000000000000000",
        "--seq 1000000000000000000",
        "--batch 1000000000 --seq 1000000000",
        "--batch 18446744073709551616",
        "--steps 4294967295",
        "--accumulate 4294967295 --world-size 4294967295",
        "--capacity 0",
        "--capacity 80GB",
        "--context 80GiB",
        "--momentum -1",
        "--momentum nan",
        "--clip-grad-norm 0",
        "--seqs 1,0",
        "--seq 4 --seqs 4",
        "--dtype int8",
        "--torch 1.0",
        "--gpu TPU",
    ] {
        let answer = run(&format!("plan llama-3-8b {setup}"));
        assert_eq!((answer.exit, answer.stdout.as_str()), (Some(2), ""), "{setup}");
        assert!(answer.stderr.starts_with("error: "), "{setup}: {}", answer.stderr);
    }
    for mlp in ["mlp:0x1", "mlp:4", "mlp:4x-1", "mlp:1048577x1", "mlp:99999999999999999999x1"] {
        assert!(run(&format!("plan {mlp}")).sentence().contains("whole numbers from 1 to 2^20"), "{mlp}");
    }
    assert_eq!(
        run("plan mlp:1000000x1").sentence(),
        "`mlp:1000000x1`: 3 steps x 1 micro-batches x 1000000 layers are more than the 131072 layers that are run for one answer; ask for fewer: from the third on, steps and micro-batches repeat each other"
    );
    assert_eq!(
        run("plan mlp:2x64 --seq 4").sentence(),
        "an mlp has no sequence: leave out `--seq` and `--seqs`"
    );
}

#[test]
fn settings_that_do_nothing_are_told() {
    let answer = run("plan gpt2 --seq 64 --momentum 0.9 --format csv");
    insta::assert_snapshot!(answer.stderr, @r"
    warning: `--momentum` does nothing with adamw
    ");
    assert_eq!(run("plan gpt2 --seq 64 --momentum 0.9 --quiet --format csv").stderr, "");
}

#[test]
fn host_memory_is_a_device_of_the_ledger() {
    let plain = run("plan gpt2 --seq 64 --format json").json();
    assert_eq!(plain["devices"].as_array().unwrap().len(), 1);
    let ledger = run("plan gpt2 --seq 64 --offload activations --format json").json();
    assert_eq!(
        ledger["devices"][1],
        json!({"name": "host", "kind": "cpu", "capacity_bytes": null, "context_bytes": null})
    );
    let rows = ledger["phases"].as_array().unwrap().iter();
    let host: Vec<_> = rows.filter(|row| row["device"] == 1 && row["phase"] == "forward").collect();
    assert_eq!(host.len(), 3);
    let end = host[0]["end"]["requested_bytes"].as_u64().unwrap();
    assert!(end > 0);
    let page = run("plan gpt2 --seq 64 --offload activations").stdout;
    assert!(page.contains("Memory of the host peaks at"), "{page}");
    assert!(page.contains("on the host:\nactivations"), "{page}");
}
