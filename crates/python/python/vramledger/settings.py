"""The settings of ``plan``: the flags of the command line, with ``_`` for ``-``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, Union

Size = Union[int, str]
"""Bytes, or a text such as ``"40GiB"``."""
Words = Union[str, Sequence[str]]
"""One word, several in a list, or several in a text with commas."""


class Settings(TypedDict, total=False):
    """What ``vramledger plan --help`` tells of each; dtypes are ``fp32``, ``bf16``, ``fp16``."""

    gpu: str
    capacity: Size
    context: Size
    alloc_conf: str
    batch: int
    seq: int
    seqs: Sequence[int]
    accumulate: int
    steps: int
    dtype: str
    autocast: str
    attention: str
    sdpa_kernel: str
    checkpoint: str
    checkpoint_reentrant: bool
    offload: Words
    keep_outputs: bool
    loss: str
    optimizer: str
    optimizer_impl: str
    momentum: float
    nesterov: bool
    weight_decay: float
    amsgrad: bool
    capturable: bool
    optimizer_in_backward: bool
    fp32_state: bool
    master_weights: bool
    clip_grad_norm: float
    zero_grad: str
    lora_rank: int
    lora_alpha: float
    lora_targets: Words
    lora_dropout: float
    lora_dtype: str
    quantize: str
    prepare_kbit: bool
    freeze: Words
    torch: str
    parallel: str
    world_size: int
    rank: int
    no_sync: bool
    gradient_as_bucket_view: bool
    bucket_cap_mb: int
    no_init_sync: bool
    find_unused_parameters: bool
    lazy_bucket_allocation: bool
    shard_size: int
    reshard_after_forward: Union[bool, int]
    root_reshard_after_forward: bool
    mp_param_dtype: str
    mp_reduce_dtype: str
    grad_reduce_in_fp32: bool
    overlap_grad_reduce: bool
    bucket_size: int
    reduce_bucket_size: int
    allgather_bucket_size: int
    no_contiguous_gradients: bool
    overlap_comm: bool
    no_overlap_comm: bool
    round_robin_gradients: bool
    grad_accum_dtype: str
    prefetch_bucket_size: int
    param_persistence_threshold: int
    max_live_parameters: int
    max_reuse_distance: int


def pairs(settings: dict[str, Any]) -> list[tuple[str, str]]:
    """Settings as keys and values of a setup file; ``None`` is not given."""

    def text(value: object) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, (list, tuple)):
            return ",".join(text(part) for part in value)
        return str(value)

    given = ((key, value) for key, value in settings.items() if value is not None)
    return [(key.replace("_", "-"), text(value)) for key, value in given]
