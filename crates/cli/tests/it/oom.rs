//! `read` of out-of-memory messages: the recorded samples, and the worked cases with what must not be said of them.

use serde_json::{Value, json};

use crate::run::{Answer, Folder};

fn samples() -> Vec<Value> {
    let lines = include_str!("../../../../tests/truth/oom/samples.jsonl").lines();
    lines.map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn sample(id: &str) -> String {
    samples().iter().find(|sample| sample["id"] == id).unwrap()["text"].as_str().unwrap().to_owned()
}

/// `text` read with `flags`, the page and the first message of the document.
fn read(text: &str, flags: &str, files: &[(&str, &str)]) -> (Answer, Value) {
    let folder = files.iter().fold(Folder::new(), |folder, (name, text)| folder.with(name, text));
    let folder = folder.with("oom.txt", text);
    let page = folder.run(&format!("read oom.txt {flags}"));
    assert_eq!(page.exit, Some(0), "{}", page.stderr);
    let document = folder.run(&format!("read oom.txt {flags} --format json")).json();
    assert_eq!(document["format"], "vramledger-instants/1");
    (page, document["instants"][0].clone())
}

/// Advice that the figures of these cases do not bear.
fn says_none_of(page: &Answer, forbidden: &[&str]) {
    let text = page.stdout.to_lowercase();
    for word in ["max_split_size", "reduce the", "batch"].iter().chain(forbidden) {
        assert!(!text.contains(word), "{word}: {text}");
    }
}

fn stack(frames: &[(&str, &str, &str)]) -> String {
    let frames = frames.iter().map(|(file, function, code)| {
        format!("  File \"/lib/python3.11/site-packages/{file}\", line 7, in {function}\n    {code}\n")
    });
    format!("Traceback (most recent call last):\n{}", frames.collect::<String>())
}

#[test]
fn the_document_has_what_is_known_of_each_sample() {
    let names = [
        ("backend", "backend"),
        ("family", "family"),
        ("requested", "requested_bytes"),
        ("device", "device"),
        ("total", "capacity_bytes"),
        ("allocated", "allocated_bytes"),
        ("active", "active_bytes"),
        ("free", "free_bytes"),
        ("cached", "unallocated_bytes"),
        ("reserved_unallocated", "unallocated_bytes"),
        ("reserved", "reserved_bytes"),
        ("private_pools", "private_pool_bytes"),
        ("allowed", "allowed_bytes"),
        ("this_process", "process_bytes"),
        ("other", "beside_bytes"),
        ("own_process_guess", "own_process_guess"),
        ("tensor_bytes_range", "tensor_bytes_range"),
        ("warnings", "warnings"),
    ];
    for sample in samples() {
        let (_, instant) = read(sample["text"].as_str().unwrap(), "", &[]);
        for (known, name) in names {
            if let Some(value) = sample["parsed"].get(known) {
                assert_eq!(instant[name], *value, "{}: {name}", sample["id"]);
            }
        }
    }
}

#[test]
fn a_request_in_the_optimizer_is_named_and_what_is_in_place_predicted() {
    let setup = "parallel = \"zero2\"\nworld-size = 8\ndtype = \"fp16\"\nseq = 512\n";
    let frames = [
        ("deepspeed/runtime/zero/stage_1_and_2.py", "_optimizer_step", "self.optimizer.step()"),
        (
            "torch/optim/adamw.py",
            "_single_tensor_adamw",
            "denom = (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)",
        ),
    ];
    let text = stack(&frames) + &sample("hint_old");
    let (page, instant) = read(&text, "--model llama-2-7b --setup setup.toml", &[("setup.toml", setup)]);
    assert_eq!((&instant["phase"], &instant["verdict"]), (&json!("update"), &json!("capacity")));
    let first = &instant["candidates"][0];
    assert_eq!((&first["bytes"], &first["decided"]), (&json!(3_369_207_808_u64), &json!(true)));
    assert_eq!(first["category"], "temporary");
    // 12.551 GiB of weights and five fp32 partitions of 3.138.
    let predicted = instant["predicted_bytes"].as_u64().unwrap() as f64 / f64::from(1 << 30);
    assert!((28.23..28.26).contains(&predicted), "{predicted}");
    assert!(page.stdout.contains("short\nby 1.19 GiB"), "{}", page.stdout);
    says_none_of(&page, &["fragmentation", "expandable"]);
}

#[test]
fn a_request_that_is_a_multiple_of_the_parameters_is_one() {
    let reducer = ("torch/nn/parallel/distributed.py", "_ddp_init_helper", "self.reducer = dist.Reducer(");
    for (asked, each) in [("51.77", 4_u64), ("25.88", 2)] {
        let message = format!(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked} GiB. GPU 0 has a total capacity of 79.14 GiB of which 20.10 GiB is free. \
             Including non-PyTorch memory, this process has 59.03 GiB memory in use. Of the allocated memory 58.00 GiB is allocated by PyTorch, and 1.00 MiB is \
             reserved by PyTorch but unallocated."
        );
        let (page, instant) = read(&(stack(&[reducer]) + &message), "--params 13896668160", &[]);
        assert_eq!(instant["candidates"][0]["bytes"], json!(each * 13_896_668_160));
        assert!(page.stdout.contains("207.08 GiB"), "{}", page.stdout);
        says_none_of(&page, &["length", "fragmentation"]);
    }
}

#[test]
fn what_the_device_is_asked_for_is_not_the_tensor() {
    let config = json!({
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 6912, "n_layer": 2, "n_head": 54,
        "n_positions": 1024, "vocab_size": 50257,
    })
    .to_string();
    let setup =
        "parallel = \"zero3\"\nworld-size = 2\ndtype = \"fp16\"\nseq = 64\noffload = [\"parameters\"]\n";
    let gather =
        ("deepspeed/runtime/zero/partition_parameters.py", "all_gather", "handle = _dist_allgather_fn(");
    let files = [("gpt.json", config.as_str()), ("setup.toml", setup)];
    let (page, instant) =
        read(&(stack(&[gather]) + &sample("reserved")), "--model gpt.json --setup setup.toml", &files);
    let decided = instant["candidates"].as_array().unwrap().iter().filter(|object| object["decided"] == true);
    let named: Vec<&str> = decided
        .filter(|object| object["bytes"] == json!(286_654_464))
        .map(|object| object["name"].as_str().unwrap())
        .collect();
    assert!(named.iter().any(|name| name.contains("c_attn")), "{named:?}");
    assert!(page.stdout.contains("273.38 MiB"), "{}", page.stdout);
}

#[test]
fn another_process_on_the_card_is_named() {
    let setup = "dtype = \"bf16\"\nseq = 64\n";
    let text = sample("capacity_nohint");
    let (page, instant) = read(&text, "--model qwen2.5-0.5b --setup setup.toml", &[("setup.toml", setup)]);
    assert_eq!(instant["verdict"], "other_process");
    for told in ["91 % of the card", "5.34", "79.08 GiB of 79.10 GiB", "259.66 MiB"] {
        assert!(page.stdout.contains(told), "{told}: {}", page.stdout);
    }
    let embedding =
        instant["candidates"].as_array().unwrap().iter().find(|object| object["category"] == "parameter");
    assert_eq!(embedding.unwrap()["shape"], json!([151_936, 896]));
    says_none_of(&page, &["expandable"]);
}

#[test]
fn ranks_that_all_opened_one_device_are_told() {
    let (page, instant) = read(&sample("returnn"), "", &[]);
    assert_eq!(instant["verdict"], "other_process");
    let roles = instant["other_processes"].as_array().unwrap().iter();
    assert_eq!(roles.filter(|process| process["role"] == "rank").count(), 15);
    for told in [
        "15 processes of 1.19 GiB each, 17.85 GiB together",
        "31.71 GiB of 31.74 GiB",
        "opened a\ncontext on device 0",
    ] {
        assert!(page.stdout.contains(told), "{told}: {}", page.stdout);
    }
    says_none_of(&page, &["expandable"]);
}

#[test]
fn what_is_asked_of_messages_is_refused_of_anything_else() {
    let folder = Folder::new().with("log.csv", "step,allocated,reserved\n1,100,200\n2,100,200\n3,100,200\n");
    let refused = folder.run("read log.csv --params 7B");
    assert!(refused.sentence().contains("`log.csv` is none"), "{}", refused.stderr);
}

#[test]
fn a_message_is_read_from_standard_input() {
    let answer = Folder::new().run_with("read - --format csv", sample("cached").as_bytes());
    assert_eq!(answer.exit, Some(0), "{}", answer.stderr);
    assert!(answer.stdout.ends_with("1,,cuda,0,308281344,306184193,308281344,8364448809,64613253,6732361236,7380255375,647894139,,,-404226048,fragmentation,oom,,,\n"), "{}", answer.stdout);
}

#[test]
fn a_request_of_nothing_has_no_range() {
    let folder = Folder::new().with("t.txt", include_str!("../../../../fuzz/seeds/oom/nothing.txt"));
    let instant = folder.run("read t.txt --format json").json()["instants"][0].clone();
    assert_eq!(instant["requested_bytes"], 0);
    assert_eq!(instant["tensor_bytes_range"], serde_json::Value::Null);
}
