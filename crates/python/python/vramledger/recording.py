"""Records a training run in its own process: the memory with its owners, at the end or where memory runs out."""

from __future__ import annotations

import bisect
import json
import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from vramledger import _native
from vramledger.documents import Ledger, wrap
from vramledger.errors import MeasureError
from vramledger.storages import StorageTape
from vramledger.tracking import PhaseMark, Track

if TYPE_CHECKING:
    import torch

ENTRIES = 10_000_000
PHASES = ("load", "forward", "loss", "backward", "update", "zero_grad")


class Recording:
    """A run that is recorded while it is entered; see ``record``."""

    ledger: Ledger
    """The books of the run, once it is over."""

    def __init__(self, path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.path, self.run = path, Track(model, optimizer)
        self._way: _Host | _Cuda = _Cuda(self.run) if self.run.on_cuda else _Host(self.run)
        self._stack = ExitStack()

    def __enter__(self) -> Recording:
        self._way.begin(self._stack)
        self._stack.enter_context(self.run)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self.ledger = self._way.end(self.path, None if error is None else f"{type(error).__name__}: {error}")
        self.ledger.save(self.path.with_suffix(".vlt"))


def record(
    path: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Recording:
    """Records the run inside ``with record("run.vlt", model, optimizer):`` and writes its tape to ``path``.

    Phases, modules and the names of parameters, gradients, state and inputs are on it; ``vramledger read run.vlt`` and
    ``vramledger.read`` take it. Written where the block ends, however it ends: where memory runs out too. On a GPU it
    is PyTorch's own recording, which goes besides to ``path`` itself where that ends in ``.pickle``, with
    ``user_metadata`` ``MARK:MODULE``. On the CPU every storage that an operator makes is followed, which costs time.
    Raises ``MeasureError`` where PyTorch's recording is on already.
    """
    return Recording(Path(path), model, optimizer)


def _counted(model: torch.nn.Module) -> tuple[int, int, int]:
    """Parameters, those that learn, and their bytes."""
    parameters = list(model.parameters())
    learn = [parameter for parameter in parameters if parameter.requires_grad]
    bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return sum(p.numel() for p in parameters), sum(p.numel() for p in learn), bytes


class _Host:
    """A run on the CPU: its storages are followed."""

    def __init__(self, run: Track) -> None:
        self.run = run
        self.tape = StorageTape(_native.Recorder(None), run.model, lambda _: True)

    def begin(self, stack: ExitStack) -> None:
        self.run.listeners.append(self._heard)
        stack.enter_context(self.tape.followed())

    def _heard(self, mark: PhaseMark) -> None:
        phase = mark.phase if mark.phase in PHASES else self.tape.phase
        self.tape.mark(mark.step, mark.micro_batch, phase)
        if phase == "load":
            self.tape.name_model()
        if phase == "forward":
            for name, tensor in self.run.inputs:
                self.tape.name(tensor, "input", name, None)
        if phase in ("load", "update") and self.run.optimizer is not None:
            self.tape.name_state(self.run.optimizer)

    def end(self, path: Path, error: str | None) -> Ledger:
        import torch

        self.tape.is_over = True
        name = type(self.run.model).__name__
        subject = {"model": {"name": name}, "software": {"torch": torch.__version__}}
        told = ["what lives inside one operator is not seen, nor what was there before and belongs to no model"]
        if error is not None:
            told.append(f"the run ended with {error}")
        counted = _counted(self.run.model)
        return cast(Ledger, wrap(self.tape.recorder.finish(name, json.dumps(subject), counted, told, "")))


class _Cuda:
    """A run on a GPU: PyTorch's allocator records it, and the notes say where it was."""

    def __init__(self, run: Track) -> None:
        self.run = run
        self.marks: list[dict[str, Any]] = []
        self.labels: list[dict[str, Any]] = []
        self.ooms: list[dict[str, Any]] = []
        self.labelled: dict[int, tuple[str, str]] = {}
        self.is_over = False

    def begin(self, stack: ExitStack) -> None:
        import torch

        memory = torch.cuda.memory
        if torch.cuda.is_initialized() and memory._snapshot()["device_traces"][torch.cuda.current_device()]:
            raise MeasureError("PyTorch's recording of memory is on already", "end it before `record`")
        memory._record_memory_history(max_entries=ENTRIES, stacks="python")
        stack.callback(self._stop)
        torch._C._cuda_attach_out_of_memory_observer(self._out_of_memory)
        self.run.listeners.append(self._heard)

    def _stop(self) -> None:
        """What is freed from here on is of nobody's step."""
        import torch

        self._note(self.run.steps, None, "end")
        self.is_over = True
        self.snapshot = torch.cuda.memory._snapshot()
        self.final = torch.cuda.memory_stats()
        torch.cuda.memory._record_memory_history(enabled=None)

    def _heard(self, mark: PhaseMark) -> None:
        # A name of the user's own is for the profiler: the tape has the phases of a step.
        phase = mark.phase if mark.phase in PHASES else self.marks[-1]["phase"]
        self._note(mark.step, mark.micro_batch, phase)
        self._label(mark.phase)

    def _note(self, step: int, micro_batch: int | None, phase: str) -> None:
        import torch

        statistics = torch.cuda.memory_stats()
        noted: dict[str, Any] = {"step": step, "micro_batch": micro_batch, "phase": phase}
        for name in ("allocated_bytes", "requested_bytes", "reserved_bytes", "active_bytes"):
            noted[name] = statistics.get(f"{name}.all.current", 0)
        self.marks.append({"mark": len(self.marks), **noted})

    def _label(self, phase: str) -> None:
        model, optimizer = self.run.model, self.run.optimizer
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._name("parameter", model.named_parameters())
        self._name("buffer", model.named_buffers())
        if phase == "forward":
            self._name("input", self.run.inputs, again=True)
        gradients = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        self._name("gradient", gradients, again=phase == "backward")
        if optimizer is not None:
            state = (
                (f"{names.get(id(parameter), 'parameter')}.{key}", value)
                for parameter, values in optimizer.state.items()
                for key, value in values.items()
            )
            self._name("optimizer_state", state)

    def _name(self, category: str, tensors: Iterable[tuple[str, Any]], again: bool = False) -> None:
        """Names the storages of tensors on the device; those that are named already, if they are made anew."""
        import torch

        objects = []
        for name, tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda and tensor.numel():
                address = tensor.untyped_storage().data_ptr()
                if again or self.labelled.get(address) != (category, name):
                    self.labelled[address] = (category, name)
                    objects.append([address, name])
        if objects:
            self.labels.append({"mark": len(self.marks) - 1, "category": category, "objects": objects})

    def _out_of_memory(self, device: int, requested: int, total: int, free: int) -> None:
        import torch

        # The observer cannot be taken off again.
        if not self.marks or self.is_over:
            return
        node = torch._C._current_autograd_node()
        at = self.run.at
        self.ooms.append(
            {
                "step": at.step,
                "micro_batch": at.micro_batch,
                "phase": at.phase,
                "device": device,
                "requested_bytes": requested,
                "capacity_bytes": total,
                "free_bytes": free,
                "module": self.run.modules[-1] if self.run.modules else "",
                "operator": node.name() if node is not None else None,
            }
        )
        if len(self.ooms) == 1:
            self._label(at.phase)

    def end(self, path: Path, error: str | None) -> Ledger:
        import torch

        if self.run.places:
            self._note_places()
        total, trainable, _ = _counted(self.run.model)
        on_device = [p for p in self.run.model.parameters() if p.is_cuda]
        notes = {
            "format": "vramledger-recording/1",
            "torch": torch.__version__,
            "device": torch.cuda.current_device(),
            "steps": self.run.steps,
            "end": "finished" if error is None else "failed",
            "error": error,
            "marks": self.marks,
            "labels": self.labels,
            "ooms": self.ooms,
            "parameters": {
                "total": total,
                "trainable": trainable,
                "bytes": sum(p.numel() * p.element_size() for p in on_device),
            },
            "final": {key: int(value) for key, value in self._figures()},
        }
        pickled = pickle.dumps(self.snapshot, protocol=4)
        if path.suffix == ".pickle":
            path.write_bytes(pickled)
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        name = type(self.run.model).__name__
        native = _native.recorded(name, device.name, device.total_memory, pickled, json.dumps(notes))
        return cast(Ledger, wrap(native))

    def _figures(self) -> Iterator[tuple[str, int]]:
        for key, value in self.final.items():
            if ".all." in key or key.startswith("num_"):
                yield key, value

    def _note_places(self) -> None:
        """Adds by the clock what the allocator of an older PyTorch could not note itself."""
        times = [at for at, _ in self.run.places]
        for trace in self.snapshot["device_traces"]:
            for entry in trace:
                index = bisect.bisect_right(times, entry["time_us"]) - 1
                entry["user_metadata"] = self.run.places[max(index, 0)][1]
