//! The pages that people read, whole.

use crate::run::{Folder, run};

#[test]
fn plan() {
    insta::assert_snapshot!(run("plan mlp:4x1024 --batch 65536 --accumulate 2").all(), @r"
    exit 0
    --- stdout
    mlp:4x1024 peaks at 2368.00 MiB requested (backward, step 2, micro-batch 2); 76.80 GiB of H100-80GB
    are left for what the allocator adds
    4.19M parameters (16.00 MiB); micro-batch 65536 x 2 rounds x 1 rank = 131072 samples an update;
    adamw; torch 2.15; 3.0 TFLOP a step; H100-80GB 79.65 GiB, of which 79.11 GiB for the allocator

    Phases, requested MiB
    step  phase         largest           at its end  weights  gradients  optimizer    other
       0  load            16.00                16.00    16.00          0          0        0
       1  forward x 2   1568.00              1312.00    16.00      16.00          0  1280.00
          backward x 2  2336.00               288.00    16.00      16.00          0   256.00
          update         336.00               304.00    16.00          0      32.00   256.00
     2-3  forward x 2   1600.00              1344.00    16.00      16.00      32.00  1280.00
          backward x 2  2368.00  <- peak      320.00    16.00      16.00      32.00   256.00
          update         336.00               304.00    16.00          0      32.00   256.00

    At the peak, MiB
    what                held   share
    weights            16.00   0.7 %
    gradients          16.00   0.7 %
    optimizer state    32.00   1.4 %
    input             256.00  10.8 %
    activations      1024.00  43.2 %
    logits and loss  1024.00  43.2 %
    the rest           <0.01   0.0 %

    What would change it most, MiB
    setting                       peak changes by       to  in
    --batch 32768 --accumulate 4         -1152.00  1216.00  backward
    --optimizer adafactor                  -31.97  2336.03  backward

    Assumed
      - cuBLAS workspace of the default size for the card, allocated around each product and freed
        (torch 2.15)
      - the CUDA context takes 550 MiB of the card, which the allocator never sees

    Not in these figures
      - requested bytes: the allocator rounds each request up (usually by 0 to 2 %) and keeps segments
        beyond them, so what it reserves is more
      - one process on one device: no other process, no NCCL, no data loader on the GPU
    ");
}

#[test]
fn plan_beyond_the_card() {
    insta::assert_snapshot!(run("plan gpt2 --seq 256 --capacity 2GiB").stdout.lines().next().unwrap(), @r"
    gpt2 peaks at 2373.50 MiB requested (update, step 1); that is 875.50 MiB more than H100-80GB has for
    ");
}

#[test]
fn compare() {
    let state = |name: &str, category: &str, mib: u32, to: &str| {
        format!(
            r#"{{"name": "{name}", "category": "{category}", "size_mb": {mib}, "start_phase": "forward",
            "end_phase": "{to}", "device": "gpu", "persistent": false}}"#
        )
    };
    let weights = state("weights", "parameter", 800, "update");
    let kept = state("hidden", "activation", 300, "backward");
    let dropped = state("hidden", "activation", 300, "forward");
    let scratch = state("scratch", "workspace", 100, "backward");
    let folder = Folder::new()
        .with("base.json", format!("[{weights}, {kept}]"))
        .with("other.json", format!("[{weights}, {dropped}, {scratch}]"));
    insta::assert_snapshot!(folder.run("compare base.json with-scratch=other.json").all(), @r"
    exit 0
    --- stdout
    base peaks at 1100.00 MiB allocated in step 1, forward

    Candidates
    name                 peak  in             saves
    with-scratch  1200.00 MiB  forward  -100.00 MiB

    Saved, by category
    category    with-scratch
    parameter      unchanged
    activation     unchanged
    workspace    -100.00 MiB

    Who is there at each peak, MiB
    object   category      base  with-scratch
    weights  parameter   800.00        800.00
    hidden   activation  300.00        300.00
    scratch  workspace        -        100.00
    ");
    let line = "reconcile base.json --allocated 1213MiB --reserved 1400MiB --capacity 1410MiB";
    insta::assert_snapshot!(folder.run(line).all(), @r"
    exit 1
    --- stdout
    1100.00 MiB are predicted in step 1, forward, 1213.00 MiB are allocated: more than 10 % above the
    prediction

    measure                       size  step                    difference
    predicted (allocated)  1100.00 MiB
    allocated              1213.00 MiB  above the prediction   +113.00 MiB
    reserved               1400.00 MiB  kept by the allocator  +187.00 MiB
    capacity               1410.00 MiB  left of it              +10.00 MiB

    Worth a look
      - inspect_estimate_difference: check the states, the saved tensors, the temporaries and what the
        prediction assumed
      - inspect_allocator_retained_space: look at the cache and at the history of allocations; it is no
        proof of fragmentation
      - capacity_pressure: little of the capacity is left; other processes and the context take more of
        the card

    Line by line
    object        category       predicted      found   difference
    weights       parameter     800.00 MiB  not known    not known
    hidden        activation    300.00 MiB  not known    not known
    unattributed  unattributed   not known  not known  +113.00 MiB

    Not to be read into it
      - a difference that nothing explains is neither a leak nor fragmentation
      - reserved less allocated is what the allocator keeps at that instant; the margin is of the given
        capacity, not of the card
    ");
}

#[test]
fn budget() {
    insta::assert_snapshot!(run("budget --params 7B,70B --gpu A100-80GB --gpus 16").all(), @r"
    exit 0
    --- stdout
    16 x A100-80GB, each 80 GB (79.26 GiB by the driver)

    Bytes a parameter, and the largest model that the cards hold together
    recipe                                 weight  gradient  master  Adam  sum  nominal   driver
    fp32                                        4         4       0     8   16   80.0 B   85.1 B
    bf16 weights and gradients, fp32 Adam       2         2       0     8   12  106.7 B  113.5 B
    mixed: bf16 copy, fp32 master weights       2         2       4     8   16   80.0 B   85.1 B
    pure bf16                                   2         2       0     4    8  160.0 B  170.2 B
    autocast on fp32 weights                    4         4       0     8   16   80.0 B   85.1 B

    Cards that a model needs at 16 bytes a parameter
    parameters  memory (10^9 B)  cards, nominal  cards, driver
            7B           112 GB               2              2
           70B         1,120 GB              14             14

    Not in these figures
      - weights, gradients and optimizer state only: activations, temporaries, workspaces and the CUDA
        context come on top
      - several cards hold a model only where its states are sharded over them (ZeRO-3, FSDP)
      - autocast on fp32 weights: and up to 2 bytes a parameter of bf16 casts inside an autocast region
    ");
}

#[test]
fn checkpoint_plan() {
    insta::assert_snapshot!(run("checkpoint-plan --layers 32 --segment 4").all(), @r"
    exit 0
    --- stdout
    32 layers: a checkpoint every 6 layers keeps least, 11.33 units; none keeps 32

    layers a segment  inputs kept  one segment  units at the peak
                   4            8            4                 12
                   6         5.33            6              11.33  least

    Not in these figures
      - a unit is the activations of one layer, and the input of a layer counts as one too: a
        transformer layer keeps ten to some tens of its input, so that keeping only inputs saves far
        more there
      - every segment is run once more in backward: about 8ND instead of 6ND floating-point operations
    ");
}

#[test]
fn tradeoff() {
    insta::assert_snapshot!(run("tradeoff --batch 8 --seq 32 --hidden 512 --dtype bf16 --saved-fraction 0.25").all(), @r"
    exit 0
    --- stdout
    One saved tensor of 8 x 32 x 512

    how it is kept        saved KiB  extra forward
    bf16 / no checkpoint     256.00             0%
    bf16 / save 25%           64.00            75%

    Not in these figures
      - one saved tensor: the fractions are assumptions that show a direction, no gain of a given model
    ");
}

#[test]
fn models_as_markdown() {
    let page = run("models --format markdown").stdout;
    let lines: Vec<&str> = page.lines().take(3).collect();
    insta::assert_snapshot!(lines.join("\n"), @r"
    | name | family | layers | hidden | heads | kv heads | vocab | max seq | dtype |
    | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |
    | gpt2 | gpt2 | 12 | 768 | 12 | 12 | 50257 | 1024 | fp32 |
    ");
}

#[test]
fn gpus() {
    let page = run("gpus").stdout;
    let lines: Vec<&str> = page.lines().take(2).collect();
    insta::assert_snapshot!(lines.join("\n"), @r"
    name        driver GiB  sold as  capability  SMs
    H100-80GB        79.65    80 GB         9.0  132
    ");
}
