"""How ranks divide the work of a training case: the model as the framework wraps it."""

import truth_checkpoint


def shard(model, parallel, on_host):
    """FSDP2 with every block and the root as units."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dtypes = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    world, together = parallel["world"], parallel.get("shard_size")
    if together:
        mesh = init_device_mesh("cuda", (world // together, together), mesh_dim_names=("copies", "shards"))
    else:
        mesh = init_device_mesh("cuda", (world,))
    arguments = {"mesh": mesh}
    param, reduce = parallel.get("mp"), parallel.get("reduce_dtype")
    if param or reduce:
        arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtypes[param], reduce_dtype=dtypes[reduce])
    if on_host:
        arguments["offload_policy"] = CPUOffloadPolicy()
    owner, name = truth_checkpoint.layers_of(model)
    for block in getattr(owner, name):
        fully_shard(block, reshard_after_forward=parallel["reshard_after_forward"], **arguments)
    if parallel.get("root_reshard_after_forward") is not None:
        arguments["reshard_after_forward"] = parallel["root_reshard_after_forward"]
    fully_shard(model, **arguments)


def replicate(model, parallel):
    """DDP."""
    import torch

    told = ("bucket_cap_mb", "init_sync", "find_unused_parameters", "lazy_bucket_allocation")
    arguments = {name: parallel[name] for name in told if parallel.get(name) is not None}
    return torch.nn.parallel.DistributedDataParallel(
        model, device_ids=[0], gradient_as_bucket_view=parallel["gradient_as_bucket_view"], **arguments
    )


def begin(model, parallel, last):
    """Before the forward pass of a micro-batch: gradients are reduced in the last one alone where the case says so."""
    if not (parallel and parallel.get("no_sync")):
        return
    if parallel["kind"] == "ddp":
        # What `no_sync()` does for the passes inside it.
        model.require_backward_grad_sync = last
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)


def whole_gradients(model):
    """Gradients that FSDP2 keeps to reduce them in a later micro-batch."""
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        for group in state._fsdp_param_groups if state else ():
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None and whole.grad is not None:
                    yield whole.grad
