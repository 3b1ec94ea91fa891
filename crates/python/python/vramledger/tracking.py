"""Where a live run is: its steps, micro-batches and phases, and the module at work, on any device.

The ranges are seen by ``torch.profiler`` (``record_function``), and what the CUDA allocator records carries
``MARK:MODULE``, the number of the mark it follows and the path of the module.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vramledger.tables import Table, rows_of
from vramledger.tensors import tensors_in

if TYPE_CHECKING:
    import torch

_active: list[Track] = []


@dataclass(frozen=True)
class PhaseMark:
    """A point of a run: what follows belongs there."""

    step: int
    """From 1; 0 is what comes before the first."""
    micro_batch: int | None
    """From 1; none in load and update."""
    phase: str
    """load, forward, backward, update, or a name that ``phase`` gave."""
    seconds: float
    """Since the beginning."""
    allocated_bytes: int | None
    """``torch.cuda.memory_allocated()`` at that moment; ``None`` on the CPU."""
    reserved_bytes: int | None
    """``torch.cuda.memory_reserved()`` at that moment; ``None`` on the CPU."""


class Track(Table):
    """Follows a run while it is entered; see ``track``."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        import torch

        self.model, self.optimizer = model, optimizer
        self.names = {id(part): name for name, part in model.named_modules()}
        self.modules: list[str] = []
        self.inputs: list[tuple[str, torch.Tensor]] = []
        """What the model was called with last, by name."""
        self.marks: list[PhaseMark] = []
        self.steps, self.backwards = 0, 0
        self.listeners: list[Callable[[PhaseMark], None]] = []
        """Called after every mark."""
        self.on_cuda = any(parameter.is_cuda for parameter in model.parameters())
        self.places: list[tuple[int, str]] = []
        """Where the run was, by the clock: for releases whose allocator takes no notes."""
        self._stack = ExitStack()
        self._range: Any = None
        self._note = getattr(torch._C, "_cuda_setMemoryMetadata", None) if self.on_cuda else None

    @property
    def at(self) -> PhaseMark:
        """Where the run is."""
        return self.marks[-1]

    def mark(self, phase: str, *, step: int | None = None, micro_batch: int | None = None) -> None:
        """Says that what follows belongs to ``phase``."""
        import torch

        step = self.steps + 1 if step is None else step
        self._leave_range()
        allocated = torch.cuda.memory_allocated() if self.on_cuda else None
        reserved = torch.cuda.memory_reserved() if self.on_cuda else None
        seconds = time.perf_counter() - self._begun
        self.marks.append(PhaseMark(step, micro_batch, phase, seconds, allocated, reserved))
        self._range = torch.profiler.record_function(f"vramledger.{phase}")
        self._range.__enter__()
        self._tell()
        for listener in self.listeners:
            listener(self.at)

    def __enter__(self) -> Track:
        from torch.nn.modules import module as hooks

        self._begun = time.perf_counter()
        handles = [
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
            self.model.register_forward_pre_hook(self._enter_model, with_kwargs=True),
        ]
        if self.optimizer is not None:
            handles.append(self.optimizer.register_step_pre_hook(lambda *_: self._enter_update()))
            handles.append(self.optimizer.register_step_post_hook(lambda *_: self._leave_update()))
        for handle in handles:
            self._stack.callback(handle.remove)
        self._stack.enter_context(self._backward_followed())
        _active.append(self)
        self.mark("load", step=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_range()
        _active.remove(self)
        self._stack.close()
        if self._note:
            self._note("")

    def _leave_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _tell(self) -> None:
        place = f"{len(self.marks) - 1}:{self.modules[-1] if self.modules else ''}"
        if self._note:
            self._note(place)
        elif self.on_cuda:
            self.places.append((time.time_ns() // 1000, place))

    def _enter_model(self, _: Any, args: Any, kwargs: Any) -> None:
        """After ``_enter_module`` of the same call."""
        import torch

        if len(self.modules) > 1 or not torch.is_grad_enabled():
            return
        named = [("input", tensor) for tensor in tensors_in(args)]
        named += [(key, tensor) for key, value in kwargs.items() for tensor in tensors_in(value)]
        self.inputs = [(name, tensor) for name, tensor in named if tensor.grad_fn is None]
        self.mark("forward", micro_batch=self.backwards + 1)

    def _enter_module(self, module: torch.nn.Module, _: Any) -> None:
        self.modules.append(self.names.get(id(module), type(module).__name__))
        self._tell()

    def _leave_module(self, *_: Any) -> None:
        if self.modules:
            self.modules.pop()
        self._tell()

    @contextmanager
    def _backward_followed(self) -> Iterator[None]:
        """``Tensor.backward`` calls ``torch.autograd.backward``, which has no hook."""
        import torch

        backward = torch.autograd.backward

        @functools.wraps(backward)
        def followed(*args: Any, **kwargs: Any) -> Any:
            self.mark("backward", micro_batch=self.backwards + 1)
            try:
                return backward(*args, **kwargs)
            finally:
                # Again: now the gradients are there.
                self.mark("backward", micro_batch=self.backwards + 1)
                self.backwards += 1

        torch.autograd.backward = followed
        try:
            yield
        finally:
            torch.autograd.backward = backward

    def _enter_update(self) -> None:
        if self.at.phase != "update":
            self.mark("update")

    def _leave_update(self) -> None:
        # Again: now the state is there.
        self.mark("update")
        self.steps, self.backwards = self.steps + 1, 0

    def _head(self) -> str:
        return f"{self.steps} steps of {type(self.model).__name__}, {len(self.marks)} marks"

    def _table(self) -> list[dict[str, Any]]:
        return rows_of(self.marks)


def track(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Track:
    """Follows the phases of a training run, a context around its loop: ``with track(model, optimizer) as run: …``.

    A forward pass of ``model`` with gradients begins the phase forward, ``backward()`` the phase backward, a step of
    ``optimizer`` the phase update, which ends with the next forward pass. ``run.marks`` has every phase with the bytes
    of the device when it began. Nothing of the run changes but that it is told where it is; other runs may be followed
    at once.
    """
    return Track(model, optimizer)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A phase of the user's own, ``with phase("loss"): …``, for the profiler and for every ``track`` at work."""
    import torch

    befores = [(run, run.at) for run in _active]
    for run, before in befores:
        run.mark(name, step=before.step, micro_batch=before.micro_batch)
    range_ = torch.profiler.record_function(f"vramledger.{name}") if not befores else None
    try:
        if range_ is not None:
            range_.__enter__()
        yield
    finally:
        if range_ is not None:
            range_.__exit__(None, None, None)
        for run, before in befores:
            run.mark(before.phase, step=before.step, micro_batch=before.micro_batch)
