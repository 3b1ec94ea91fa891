"""DeepSpeed's ZeRO, as a training case asks for it: the engine around a model, one rank of a job."""

import os
import sys

# DeepSpeed's names of the options that a case may give, and the stage of which they are.
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "contiguous_gradients", "overlap_comm", "round_robin_gradients")
STAGE3 = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
)


def is_zero(parallel):
    """Whether ranks divide the work by ZeRO."""
    return bool(parallel) and (parallel["kind"] or "").startswith("zero")


def config(setup):
    """The configuration of `deepspeed.initialize`."""
    parallel = setup["parallel"]
    stage = int(parallel["kind"].removeprefix("zero"))
    zero = {"stage": stage}
    for name in BUCKETS:
        if parallel.get(name) is not None:
            zero[name] = parallel[name]
    for name in STAGE3:
        if parallel.get(name) is not None:
            zero[name if name.startswith("sub") else f"stage3_{name}"] = parallel[name]
    for name, key in (("optimizer", "offload_optimizer"), ("parameters", "offload_param")):
        if name in setup.get("offload", ()):
            zero[key] = {"device": "cpu", "pin_memory": False}
    made = {
        "train_micro_batch_size_per_gpu": setup["batch"],
        "gradient_accumulation_steps": setup["accumulate"],
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if setup["clip_grad_norm"] is not None:
        made["gradient_clipping"] = setup["clip_grad_norm"]
    if setup["dtype"] == "fp16":
        made["fp16"] = {"enabled": True, "loss_scale": parallel.get("loss_scale") or 0, "initial_scale_power": 16}
    if setup["dtype"] == "bf16":
        made["bf16"] = {"enabled": True}
    if parallel.get("grad_accum_dtype"):
        made["data_types"] = {"grad_accum_dtype": parallel["grad_accum_dtype"]}
    return made


def start(parallel):
    """The process group, and what DeepSpeed asks of its launcher."""
    import vramledger_ranks

    rank, world = parallel.get("rank", 0), parallel["world"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="1")
    vramledger_ranks.start("nccl", rank, world)
    take_gradients_as_finite()


def take_gradients_as_finite():
    """On an emulated device no gradient has a value: whether they are finite is asked, and the answer is yes."""
    import vramledger_host

    if not vramledger_host.emulated():
        return
    import torch
    import deepspeed.runtime.bf16_optimizer as bf16
    import deepspeed.runtime.utils as utils
    import deepspeed.runtime.zero.stage3 as stage3
    import deepspeed.runtime.zero.stage_1_and_2 as stage_1_and_2

    def answered(question, answer=False):
        def ask(*arguments, **named):
            question(*arguments, **named)
            return answer

        return ask

    for module in (bf16, stage3, stage_1_and_2):
        if hasattr(module, "is_invalid_grad_norm"):
            module.is_invalid_grad_norm = answered(utils.is_invalid_grad_norm)
    # Nor has another rank told the order of its modules, of a few bytes each: it is this one's.
    coordinator = sys.modules["deepspeed.runtime.zero.partitioned_param_coordinator"]
    coordinator.assert_ints_same_as_other_ranks = lambda integers: None
    # What a message about a parameter allocates is none of the run.
    torch.nn.Parameter.__repr__ = lambda parameter: "a parameter"
    for kind in (stage_1_and_2.DeepSpeedZeroOptimizer, stage3.DeepSpeedZeroOptimizer_Stage3):
        kind.has_overflow = answered(kind.has_overflow)


def partition(setup):
    """What leaves this rank its part of a parameter that was just made; none before stage 3."""
    import deepspeed
    import torch

    if setup["parallel"]["kind"] != "zero3":
        return None
    context = deepspeed.zero.Init(
        module=torch.nn.Module(),
        config_dict_or_path=config(setup),
        remote_device="cpu" if "parameters" in setup.get("offload", ()) else None,
    )
    return lambda parameter: context._convert_to_zero_parameters([parameter])


def wrap(model, setup):
    """The engine around `model` and its optimizer."""
    import deepspeed
    import truth_optimizers

    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = truth_optimizers.make(trainable, {**setup, "offload": ()}, model)[0]
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config(setup))[0]


def backward(engine, loss, last):
    """The backward pass of a micro-batch; before the last one, a step updates nothing."""
    engine.backward(loss)
    if not last:
        engine.step()
