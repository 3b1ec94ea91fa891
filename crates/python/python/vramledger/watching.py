"""Growth while training: a warning that names who holds more and more."""

from __future__ import annotations

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vramledger.tables import Table, rows_of

if TYPE_CHECKING:
    import torch

# Windows in a row that must all have grown.
PATIENCE = 3
CONTAINERS = (list, tuple, dict, set)


class GrowthWarning(UserWarning):
    """A run holds more at the end of every window of steps."""


@dataclass(frozen=True)
class Window:
    """The end of a window of steps."""

    step: int
    bytes: int
    """``torch.cuda.memory_allocated()`` on all devices, else the storages of the tensors that Python sees."""
    tensors: int
    """Tensors that Python sees."""


@dataclass(frozen=True)
class _Kind:
    """Tensors of one look."""

    shape: tuple[int, ...]
    dtype: str
    graph: str | None

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        kept = f", each with its graph ({self.graph})" if self.graph else ""
        return f"{shape} {self.dtype}{kept}"


class Watch(Table):
    """Looks at the end of every ``every``-th step; see ``watch``."""

    def __init__(self, every: int, notify: Callable[[str], Any] | None) -> None:
        if every < 1:
            raise ValueError("`every` is 1 or more")
        self.every, self.notify = every, notify
        self.steps = 0
        self.windows: list[Window] = []
        self.warnings: list[str] = []
        self._kinds: list[Counter[_Kind]] = []
        # The first window is warm-up: the optimizer makes its state there.
        self._begin = 1

    def step(self) -> None:
        """Call it at the end of every step."""
        self.steps += 1
        if self.steps % self.every == 0:
            self._look()

    def _look(self) -> None:
        import torch

        tensors = _tensors()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            held = sum(torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count()))
        else:
            held = sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values())
        self.windows.append(Window(self.steps, held, len(tensors)))
        self._kinds = [*self._kinds[-PATIENCE:], Counter(map(_kind, tensors))]
        last = self.windows[self._begin :][-PATIENCE - 1 :]
        if len(last) <= PATIENCE:
            return
        pairs = list(zip(last, last[1:]))
        if all(a.bytes < b.bytes for a, b in pairs) or all(a.tensors < b.tensors for a, b in pairs):
            self._warn(last, tensors)
            # The next warning is of what comes after.
            self._begin = len(self.windows)

    def _warn(self, last: list[Window], tensors: list[torch.Tensor]) -> None:
        steps = last[-1].step - last[0].step
        more = last[-1].bytes - last[0].bytes
        text = f"step {self.steps}: {more:+,} bytes in {steps} steps, {more // steps:,} a step"
        grown = self._kinds[-1] - self._kinds[0]
        if grown:
            kind, count = max(grown.items(), key=lambda item: (item[1], str(item[0])))
            text += f"; {count} more tensors of {kind}"
            holder = _holder([one for one in tensors if _kind(one) == kind])
            if holder:
                text += f", held by {holder}"
            if kind.graph:
                text += ": keep `loss.item()` or `loss.detach()` in its place"
        self.warnings.append(text)
        if self.notify is not None:
            self.notify(text)
        else:
            warnings.warn(text, GrowthWarning, stacklevel=4)

    def callback(self) -> Any:
        """The same as a callback of Hugging Face's ``Trainer``."""
        from transformers import TrainerCallback

        look = self.step

        class WatchCallback(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, *_: Any, **__: Any) -> None:
                look()

        return WatchCallback()

    def _head(self) -> str:
        return "\n".join(self.warnings) or f"nothing grows in {self.steps} steps"

    def _table(self) -> list[dict[str, Any]]:
        return rows_of(self.windows)


def watch(every: int = 50, *, notify: Callable[[str], Any] | None = None) -> Watch:
    """Watches a run for growth: call ``.step()`` at the end of every step, or give ``.callback()`` to a Trainer.

    Every ``every`` steps it looks at what is held (bytes of all devices, and the tensors that Python sees). Where that
    grew in three windows one after the other it says so once, with what there is more of and who holds it: by
    ``notify(text)``, else as a ``GrowthWarning``. A look takes some milliseconds for every 100,000 objects of Python.
    """
    return Watch(every, notify)


def _tensors() -> list[torch.Tensor]:
    """The tensors that Python's garbage collector sees, parameters of a module and others."""
    import torch

    # By type: some objects do things when they are asked for their class.
    return [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and _has_storage(one)]


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _kind(tensor: torch.Tensor) -> _Kind:
    graph = tensor.grad_fn.name() if tensor.grad_fn is not None else None
    return _Kind(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), graph)


def _holder(tensors: list[torch.Tensor]) -> str | None:
    """The container that holds most of ``tensors``, by its name."""
    mine = {id(one) for one in tensors}
    holders: Counter[int] = Counter()
    found: dict[int, Any] = {}
    for one in gc.get_referrers(*tensors[:1000]):
        if isinstance(one, CONTAINERS) and one is not tensors:
            values = one.values() if isinstance(one, dict) else one
            count = sum(id(value) in mine for value in list(values))
            if count > 1:
                holders[id(one)], found[id(one)] = count, one
    for key, count in holders.most_common():
        name = _name(found[key])
        if name is not None:
            return f"`{name}` ({count} of them)"
    return None


def _name(container: Any) -> str | None:
    """What a container is called where the program is, in its modules, or as an attribute of an object."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] != "vramledger":
            for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
                if value is container:
                    return f"{name} in {frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}"
                attributes = getattr(value, "__dict__", None) if not isinstance(value, type(sys)) else None
                for key, one in (attributes or {}).items():
                    if one is container:
                        return f"{name}.{key} in {frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return None
