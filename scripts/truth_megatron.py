"""Megatron's DistributedDataParallel and DistributedOptimizer around the model of a training case.

They come with the package megatron-core, without Transformer Engine or Apex: then its Adam is that of torch.
"""


def wrap(model, setup):
    """The model with its parameters and gradients in buffers, on one rank of the job that has been started."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    parallel = setup["parallel"]
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    buffers = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=parallel["grad_reduce_in_fp32"],
        overlap_grad_reduce=parallel.get("overlap_grad_reduce", False),
        overlap_param_gather=parallel.get("overlap_param_gather", False),
        bucket_size=parallel.get("bucket_size"),
    )
    # What it says of a transformer is read by the models of Megatron alone.
    transformer = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    return DistributedDataParallel(transformer, buffers, model)


class Optimizer:
    """The distributed optimizer, under the names that the training loop of a case calls."""

    def __init__(self, model, setup, dtype):
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        if setup["clip_grad_norm"] is not None:
            clip_always()
        # What torch takes where nothing is said.
        usual = 0.01 if setup["optimizer"] == "adamw" else 0.0
        decay = usual if setup.get("weight_decay") is None else setup["weight_decay"]
        config = OptimizerConfig(
            optimizer="adam",
            decoupled_weight_decay=setup["optimizer"] == "adamw",
            lr=1e-3,
            bf16=setup["dtype"] == "bf16",
            fp16=setup["dtype"] == "fp16",
            params_dtype=dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=setup["parallel"].get("overlap_param_gather", False),
            clip_grad=setup["clip_grad_norm"] or 0.0,
            weight_decay=decay,
        )
        self.model, self.scales = model, config.fp16
        self.chained = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
        (self.optimizer,) = self.chained.chained_optimizers

    @property
    def state(self):
        return self.optimizer.optimizer.state

    def scaled(self, loss):
        """The loss as backward wants it: fp16 has a scale."""
        return self.chained.scale_loss(loss) if self.scales else loss

    def step(self):
        self.model.finish_grad_sync()
        self.chained.step()

    def zero_grad(self, set_to_none):
        self.chained.zero_grad(set_to_none=set_to_none)
        self.model.zero_grad_buffer()


def clip_always():
    """Takes every norm of gradients for one to be clipped: on an emulated device it has no value."""
    import vramledger_host
    from megatron.core.optimizer import optimizer

    if not vramledger_host.emulated():
        return
    norm = optimizer.get_grad_norm_fp32

    def endless(*arguments, **rest):
        norm(*arguments, **rest)
        return float("inf")

    optimizer.get_grad_norm_fp32 = endless
