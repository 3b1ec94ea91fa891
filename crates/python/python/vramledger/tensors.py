"""The tensors in a value, and the storages in a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a result: in lists, mappings and what has values like one, and the fields of dataclasses."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict) or hasattr(value, "values") and callable(value.values):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with other tensors in place of its own: in lists, tuples and mappings."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(one, change) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [mapped(one, change) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that have a storage each: the tensor itself, or what a sparse or a wrapping one is made of."""
    import torch

    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout is not torch.strided:
        return []
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in parts_of(getattr(tensor, name))]
    return [tensor]


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """What tells the storage of a strided tensor from every other that is alive, and its bytes."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()
