"""What autograd keeps of a forward pass: each storage once, parameters apart, by module and operator."""

from __future__ import annotations

import bisect
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from vramledger.tables import Table, rows_of
from vramledger.tensors import parts_of, storage_of, tensors_in

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Saved:
    """A storage that autograd keeps."""

    module: str
    """The path of the innermost module at work when it was first kept; empty outside of one."""
    made_in: str
    """The path of the module that made it, where the graph tells; else that which keeps it."""
    operator: str
    """The operator whose backward first kept it: ``addmm``, ``relu``; empty where the graph does not tell."""
    kind: str
    """parameter, buffer, or activation: whatever else is kept, the inputs of the pass too."""
    name: str | None
    """The name of a parameter or a buffer."""
    shape: tuple[int, ...]
    """The shape of the tensor that was kept first; others may be views of the same storage."""
    dtype: str
    """``float32``, …"""
    bytes: int
    """Bytes of the whole storage."""
    device: str
    """``cpu``, ``cuda:0``, …"""
    uses: int
    """How many times it was kept."""
    also: tuple[str, ...]
    """The other operators that keep it, as ``module.operator``."""


@dataclass(frozen=True)
class SavedTensors(Table, Generic[T]):
    """What autograd keeps when a function has run."""

    rows: tuple[Saved, ...]
    """Every storage, in the order in which they were kept."""
    result: T = field(repr=False)
    """What the function returned."""

    @property
    def activations(self) -> list[Saved]:
        """What is neither parameter nor buffer."""
        return [row for row in self.rows if row.kind == "activation"]

    @property
    def activation_bytes(self) -> int:
        """Bytes of the activations."""
        return sum(row.bytes for row in self.activations)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters and buffers, which are there with or without autograd."""
        return sum(row.bytes for row in self.rows) - self.activation_bytes

    def by_module(self) -> dict[str, int]:
        """Bytes of activations by module."""
        return self._sums(lambda row: row.module)

    def by_operator(self) -> dict[str, int]:
        """Bytes of activations by operator."""
        return self._sums(lambda row: row.operator)

    def _sums(self, key: Callable[[Saved], str]) -> dict[str, int]:
        sums: dict[str, int] = {}
        for row in self.activations:
            sums[key(row)] = sums.get(key(row), 0) + row.bytes
        return sums

    def _head(self) -> str:
        return f"autograd keeps {self.activation_bytes:,} bytes of activations in {len(self.activations)} storages"

    def _table(self) -> list[dict[str, Any]]:
        return rows_of(self.rows)


class _Pack:
    """A saved tensor as autograd holds it: gone when autograd lets go."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@dataclass
class _Note:
    module: str
    made_in: str
    node: int
    storage: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    device: str
    pack: weakref.ref[_Pack]
    operator: str = ""


class _Watch:
    """The hooks of one pass."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names = names
        self.notes: list[_Note] = []
        self.modules: list[str] = []
        # Where the operators of each module begin, by their numbers.
        self.sequence: list[tuple[int, str]] = []

    def pack(self, tensor: torch.Tensor) -> _Pack:
        from torch.autograd import _get_sequence_nr

        # With its graph, a result would keep the node that keeps it.
        kept = _Pack(tensor.detach())
        for part in parts_of(tensor):
            storage, bytes = storage_of(part)
            self.notes.append(
                _Note(
                    module=self.module,
                    made_in=self.maker(tensor),
                    # The node that keeps it is the last that was made.
                    node=_get_sequence_nr() - 1,
                    storage=storage,
                    shape=tuple(part.shape),
                    dtype=str(part.dtype).removeprefix("torch."),
                    bytes=bytes,
                    device=str(part.device),
                    pack=weakref.ref(kept),
                )
            )
        return kept

    @property
    def module(self) -> str:
        return self.modules[-1] if self.modules else ""

    def maker(self, tensor: torch.Tensor) -> str:
        """The module at work when the storage of ``tensor`` was made: its operator has a number."""
        base = tensor if tensor._base is None else tensor._base
        if base.grad_fn is None or not hasattr(base.grad_fn, "_sequence_nr"):
            return self.module
        number = base.grad_fn._sequence_nr()
        place = bisect.bisect_right(self.sequence, number, key=lambda begin: begin[0]) - 1
        return self.sequence[place][1] if place >= 0 else ""

    def unpack(self, kept: _Pack) -> torch.Tensor:
        return kept.tensor

    @contextmanager
    def modules_followed(self) -> Iterator[None]:
        """Knows the innermost module at work."""
        from torch.autograd import _get_sequence_nr
        from torch.nn.modules import module as hooks

        def enter(module: torch.nn.Module, _: Any) -> None:
            self.modules.append(self.names.get(id(module), type(module).__name__))
            self.sequence.append((_get_sequence_nr(), self.module))

        def leave(*_: Any) -> None:
            if self.modules:
                self.modules.pop()
            self.sequence.append((_get_sequence_nr(), self.module))

        before = hooks.register_module_forward_pre_hook(enter)
        after = hooks.register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def name_operators(self, result: Any) -> None:
        """Walks the graph behind ``result``: which node keeps what. Nodes are numbered as they are made."""
        nodes = [tensor.grad_fn for tensor in tensors_in(result) if tensor.grad_fn is not None]
        seen, operators = set(), {}
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes.extend(following for following, _ in node.next_functions)
            if hasattr(node, "_sequence_nr"):
                operators[node._sequence_nr()] = operator_of(node.name())
        for note in self.notes:
            note.operator = operators.get(note.node, "")


def operator_of(node: str) -> str:
    """The operator behind a node of the graph: ``NativeLayerNormBackward0`` is ``native_layer_norm``."""
    name = re.sub(r"Backward\d*$", "", node.rsplit("::", 1)[-1])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def saved_tensors(
    fn: Callable[[], T],
    params: torch.nn.Module | Iterable[torch.Tensor] | None = None,
) -> SavedTensors[T]:
    """Runs ``fn`` and tells what autograd keeps for its backward at its end, each storage once.

    ``params`` (a module, or its parameters) are told apart from activations; a module names what its parts keep. What
    was kept and let go of before ``fn`` ends does not count, nor do the temporaries of the backward pass or what the
    allocator rounds up. The result can be backpropagated as ever. On any device, fake tensors included.
    """
    import torch

    named: dict[int, tuple[str, str | None]] = {}
    parts: list[tuple[str, str | None, torch.Tensor]]
    modules: dict[int, str] = {}
    if isinstance(params, torch.nn.Module):
        modules = {id(part): name for name, part in params.named_modules()}
        parts = [("buffer", *pair) for pair in params.named_buffers()]
        parts += [("parameter", *pair) for pair in params.named_parameters()]
    else:
        parts = [("parameter", None, parameter) for parameter in params or ()]
    for kind, name, tensor in parts:
        for part in parts_of(tensor):
            named[storage_of(part)[0]] = (kind, name)
    watch = _Watch(modules)
    with watch.modules_followed(), torch.autograd.graph.saved_tensors_hooks(watch.pack, watch.unpack):
        result = fn()
    watch.name_operators(result)
    return SavedTensors(tuple(_rows(watch.notes, named)), result)


def _rows(notes: list[_Note], named: dict[int, tuple[str, str | None]]) -> Iterator[Saved]:
    """A row for each storage that is still kept."""
    groups: dict[int, list[_Note]] = {}
    for note in notes:
        if note.pack() is not None:
            groups.setdefault(note.storage, []).append(note)
    for storage, group in groups.items():
        first = group[0]
        kind, name = named.get(storage, ("activation", None))
        others = dict.fromkeys(f"{note.module}.{note.operator}".strip(".") for note in group[1:])
        yield Saved(
            module=first.module,
            made_in=first.made_in,
            operator=first.operator,
            kind=kind,
            name=name,
            shape=first.shape,
            dtype=first.dtype,
            bytes=first.bytes,
            device=first.device,
            uses=len(group),
            also=tuple(others),
        )
