//! The pages that people read, whole.

use crate::run::{Folder, run};

#[test]
fn plan() {
    insta::assert_snapshot!(run("plan mlp:4x1024 --batch 65536 --accumulate 2").all(), @r"
    exit 0
    --- stdout
    mlp:4x1024 fits on H100-80GB: reserves 2614.00 MiB, 76.56 GiB to spare; allocated peaks at 2368.00
    MiB (backward, step 2, micro-batch 2)
    4.19M parameters (16.00 MiB); micro-batch 65536 x 2 rounds x 1 rank = 131072 samples an update;
    adamw; torch 2.15; 3.0 TFLOP a step; H100-80GB 79.65 GiB, of which 79.11 GiB for the allocator

    Phases, MiB: the largest totals, and what is held at the end
    step  phase         reserved  allocated           at the end  weights  gradients  optimizer    other
       0  load             20.00      16.00                16.00    16.00          0          0        0
       1  forward x 2    2358.00    1568.00              1312.00    16.00      16.00          0  1280.00
          backward x 2   2358.00    2336.00               288.00    16.00      16.00          0   256.00
          update         2358.00     336.00               304.00    16.00          0      32.00   256.00
     2-3  forward x 2    2614.00    1600.00              1344.00    16.00      16.00      32.00  1280.00
          backward x 2   2614.00    2368.00  <- peak      320.00    16.00      16.00      32.00   256.00
          update         2614.00     336.00               304.00    16.00          0      32.00   256.00

    The card when most is reserved, MiB
    measure       total       more  which is
    requested   2352.00             asked for by the program
    allocated   2352.00     +<0.01  rounding up to blocks
    active      2352.00         +0  blocks that wait for other streams
    reserved    2614.00    +262.00  cached by the allocator
    process     3164.00    +550.00  CUDA context: differs by card, driver and loaded kernels
    device     81559.00  +78395.00  left of the card

    At the peak, MiB
    what                held   share
    weights            16.00   0.7 %
    gradients          16.00   0.7 %
    optimizer state    32.00   1.4 %
    input             256.00  10.8 %
    activations      1024.00  43.2 %
    logits and loss  1024.00  43.2 %
    the rest           <0.01   0.0 %

    What would change it most, requested MiB
    setting                       peak changes by       to  in
    --batch 32768 --accumulate 4         -1152.00  1216.00  backward
    --optimizer adafactor                  -31.97  2336.03  backward

    Assumed
      - cuBLAS workspace of the default size for the card, allocated around each product and freed
        (torch 2.15)

    Not in these figures
      - one process on one device: no other process, no NCCL, no data loader on the GPU
    ");
}

#[test]
fn plan_that_does_not_fit() {
    insta::assert_snapshot!(run("plan gpt2 --seq 256 --capacity 2GiB").all(), @r"
    exit 1
    --- stdout
    gpt2 does not fit on H100-80GB: out of memory in update of step 1
    It asks for 9.00 MiB for transformer.h.*.mlp.c_proj.weight.exp_avg_sq (event 2,133), for which the
    allocator tries to take 20.00 MiB of the card: 6.00 MiB more than is left; 1484.00 MiB are reserved,
    and the largest free block of its kind has 2.00 MiB. Given room it would peak at 2373.50 MiB
    requested (update, step 1).
    124.44M parameters (474.70 MiB); micro-batch 1; length 256; adamw; attention sdpa; torch 2.15; 198.2
    GFLOP a step; H100-80GB 2048.00 MiB, of which 1498.00 MiB for the allocator

    Phases, MiB: the largest totals, and what is held at the end
    step  phase     reserved  allocated           at the end  weights  gradients  optimizer   other
       0  load        530.00     475.46               474.70   474.70          0          0       0
       1  forward     970.00     854.85               800.16   474.70          0          0  325.46
          backward   1464.00    1252.43               949.40   474.70     474.70          0   <0.01
          update     1484.00    1412.15  <- peak     1403.10   474.70     474.70     453.70   <0.01

    The card when it failed, MiB
    measure      total     more  which is
    requested  1403.10           asked for by the program
    allocated  1412.15    +9.05  rounding up to blocks
    active     1412.15       +0  blocks that wait for other streams
    reserved   1484.00   +71.85  cached by the allocator
    process    2034.00  +550.00  CUDA context: differs by card, driver and loaded kernels
    device     2048.00   +14.00  left of the card

    Allocated when it failed, MiB
    what                     held   share
    weights                474.70  33.6 %
    gradients              474.70  33.6 %
    optimizer state        453.70  32.1 %
    rounding up to blocks    9.05   0.6 %
    the rest                <0.01   0.0 %

    The largest holders when it failed, MiB
    objects                            category         count    held
    transformer.wte.weight             parameter            1  147.24
    transformer.wte.weight             gradient             1  147.24
    transformer.wte.weight.exp_avg     optimizer_state      1  147.24
    transformer.wte.weight.exp_avg_sq  optimizer_state      1  147.24
    transformer.h.*.mlp.c_fc.weight    parameter           12  108.00

    What would change it most, requested MiB
    setting                 peak changes by       to  in
    --lora-rank 16                 -1514.94   858.56  backward  fits
    --dtype bf16                   -1186.75  1186.75  update    fits
    --optimizer adafactor          -1128.40  1245.10  backward  fits
    --optimizer-impl fused          -180.23  2193.28  backward  does not fit

    Assumed
      - modelling code of transformers 5.24 in eager mode; no padding, labels are the input ids
      - cuBLAS workspace of the default size for the card, allocated around each product and freed
        (torch 2.15)
      - attention runs the memory-efficient kernel

    Not in these figures
      - one process on one device: no other process, no NCCL, no data loader on the GPU
    --- stderr
    warning: 2 requests find room only after the allocator gives all its cached blocks back, which is slow
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

    What with-scratch has more or less at its peak, MiB
    object   category   base  with-scratch  difference
    scratch  workspace     0        100.00     +100.00
    all                                        +100.00
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
    object        category       predicted      found   difference  reason
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
fn budget_of_a_rank() {
    insta::assert_snapshot!(run("budget gpt2 --parallel megatron-do --world-size 3 --rank 2").all(), @r"
    exit 0
    --- stdout
    Rank 2 of 3, megatron-do

    Bytes a parameter under megatron-do
    recipe                                 weight  gradient  master  Adam       sum  in the update
    fp32                                        4         4       0   8/3   8 + 8/3              0
    mixed: bf16 copy, fp32 master weights       2         4     4/3   8/3  6 + 12/3              0
    fp16, fp32 master weights                   2         2     4/3   8/3  4 + 12/3            4/3

    Bytes a parameter on one rank
    recipe                                   ddp  zero1  zero2  zero3  fsdp2  megatron-do
    fp32                                   16.00  12.00   9.33   6.67   5.33        10.67
    bf16 weights and gradients, fp32 Adam  12.00      -      -      -   4.00            -
    mixed: bf16 copy, fp32 master weights  16.00   8.00   6.67   5.33   5.33        10.00
    pure bf16                               8.00   6.00   4.67   3.33   2.67            -
    autocast on fp32 weights               16.00  12.00   9.33   6.67   5.33            -
    fp16, fp32 master weights              16.00   8.00   6.67   5.33   5.33         8.00

    Bytes of gpt2 on rank 2 under megatron-do
    recipe                                     weights    gradients      masters         Adam            sum  padding in it
    fp32                                   497,759,232  497,759,232            0  331,839,488  1,327,357,952              0
    mixed: bf16 copy, fp32 master weights  248,879,616  497,759,232  165,919,744  331,839,488  1,244,398,080              0
    fp16, fp32 master weights              248,879,616  248,879,616  165,919,744  331,839,488    995,518,464              0

    124.44M parameters, 10^9 B on one rank
    recipe                                   ddp  zero1  zero2  zero3  fsdp2  megatron-do
    fp32                                   1.991  1.493  1.161  0.830  0.664        1.327
    bf16 weights and gradients, fp32 Adam  1.493      -      -      -  0.498            -
    mixed: bf16 copy, fp32 master weights  1.991  0.996  0.830  0.664  0.664        1.244
    pure bf16                              0.996  0.747  0.581  0.415  0.332            -
    autocast on fp32 weights               1.991  1.493  1.161  0.830  0.664            -
    fp16, fp32 master weights              1.991  0.996  0.830  0.664  0.664        0.996

    Not in these figures
      - states only: activations, buckets, gathered weights, temporaries, workspaces and the context
        come on top; `vramledger plan --parallel` has them
      - the copy of the gradients that the update makes lives in it alone and is not in the sums: with
        it ZeRO-2 is the 2P + 18P/N of DeepSpeed's estimator, ZeRO-1 the 4P + 16P/N that its
        documentation gives for ZeRO-2, and Megatron in fp16 the published 4 + 16/d
      - zero1 to zero3 are DeepSpeed's, which steps a copy of its partition even where weights are fp32;
        fsdp2 and hsdp hold fp32 weights and gather 16-bit copies; megatron-do sums bf16 gradients in
        fp32
      - ddp has buckets of the gradients' size besides, unless gradient_as_bucket_view is set
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
fn checkpoint_plan_of_a_model() {
    insta::assert_snapshot!(run("checkpoint-plan mlp:16x1024 --budget 280MiB --batch 4096 --optimizer sgd").all(), @r"
    exit 0
    --- stdout
    16 layers within 280.00 MiB allocated: --checkpoint segments:2x5 recomputes least, 85.9 GFLOP of
    137.4 GFLOP of the forward pass
    A layer keeps 16.00 MiB and leaves 16.00 MiB to the next, as requested.

    recomputed           allocated MiB  peak in           recomputed a step        --checkpoint
    none                        400.00  backward, step 1          0.0 MFLOP        none
    every layer                 400.00  backward, step 1        137.4 GFLOP        full
    square root                 244.00  backward, step 1        137.4 GFLOP  fits  segments:4x4
    least memory                244.00  backward, step 1        120.3 GFLOP  fits  segments:2x4,2x3
    least recomputation         272.00  backward, step 1         85.9 GFLOP  best  segments:2x5

    Not in these figures
      - recomputed are layers from the first on, in segments, and the last layers are not: elsewhere
        they would save less
      - the dynamic programme takes what each layer keeps, its input and what backward holds besides
        from three runs; each row is a run of its own
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
