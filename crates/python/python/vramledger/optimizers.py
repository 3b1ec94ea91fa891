"""The state of an optimizer: tensors, bytes, devices, and when it comes to be."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vramledger.tables import Table, rows_of
from vramledger.tensors import parts_of, tensors_in

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StateTensor:
    """A tensor of an optimizer's state."""

    parameter: str
    """The name of its parameter, or its place as ``group.index``."""
    key: str
    """``exp_avg``, ``exp_avg_sq``, ``step``, ``momentum_buffer``, …"""
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    """Elements times their size."""
    device: str


@dataclass(frozen=True)
class OptimizerState(Table):
    """What an optimizer holds at this moment."""

    rows: tuple[StateTensor, ...]
    optimizer: str
    """The class of the optimizer."""
    parameter_bytes: int
    """Bytes of the parameters that it trains."""
    missing: tuple[str, ...]
    """Parameters that have no state yet."""
    lazy: bool | None
    """Whether state comes with the first step, and not with the optimizer; ``None`` where that cannot be tried."""

    @property
    def bytes(self) -> int:
        """Bytes of all state."""
        return sum(row.bytes for row in self.rows)

    @property
    def created(self) -> bool:
        """Whether there is any state."""
        return bool(self.rows)

    def by_key(self) -> dict[str, int]:
        """Bytes by key."""
        return self._sums("key")

    def by_device(self) -> dict[str, int]:
        """Bytes by device."""
        return self._sums("device")

    def _sums(self, field: str) -> dict[str, int]:
        sums: dict[str, int] = {}
        for row in self.rows:
            key = str(getattr(row, field))
            sums[key] = sums.get(key, 0) + row.bytes
        return sums

    def _head(self) -> str:
        if not self.rows:
            when = {True: "; it comes with the first step", False: "", None: ""}[self.lazy]
            return f"{self.optimizer} holds no state yet{when}"
        ratio = self.bytes / self.parameter_bytes if self.parameter_bytes else 0.0
        devices = ", ".join(f"{bytes:,} on {device}" for device, bytes in self.by_device().items())
        return f"{self.optimizer} holds {self.bytes:,} bytes, {ratio:.2f} times its parameters: {devices}"

    def _table(self) -> list[dict[str, Any]]:
        return rows_of(self.rows)


def optimizer_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None = None) -> OptimizerState:
    """What ``optimizer`` holds now. ``model`` gives its parameters their names.

    Counters on the host (of the loops over parameters) and on the device (fused, capturable) are told apart by their
    device. Nothing is run, and nothing is changed.
    """
    names = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
    rows, missing, bytes = [], [], 0
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"{number}.{index}")
            bytes += parameter.numel() * parameter.element_size()
            state = optimizer.state.get(parameter)
            found = [
                StateTensor(
                    parameter=name,
                    key=str(key),
                    shape=tuple(part.shape),
                    dtype=str(part.dtype).removeprefix("torch."),
                    bytes=part.numel() * part.element_size(),
                    device=str(part.device),
                )
                for key, value in (state or {}).items()
                for tensor in tensors_in(value)
                for part in parts_of(tensor)
            ]
            rows += found
            if not found and parameter.requires_grad:
                missing.append(name)
    return OptimizerState(tuple(rows), type(optimizer).__name__, bytes, tuple(missing), _is_lazy(optimizer))


def _is_lazy(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether a new optimizer of its kind has no state."""
    import torch

    takes = inspect.signature(type(optimizer)).parameters
    options: dict[str, Any] = {key: value for key, value in optimizer.defaults.items() if key in takes}
    try:
        fresh = type(optimizer)([torch.nn.Parameter(torch.zeros(1))], **options)
    except Exception:
        # A class of the user's own may want other arguments, or another device.
        return None
    return not any(map(bool, fresh.state.values()))
