"""A tape of storages: every one that an operator makes, until the last tensor that has it is gone.

Works on whatever PyTorch dispatches: tensors of the host, of a device, fake ones. What lives and dies inside an
operator is not seen.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from vramledger import _native
from vramledger.tensors import parts_of, tensors_in

if TYPE_CHECKING:
    import torch

DTYPES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int64": "int64",
    "int32": "int32",
    "uint8": "uint8",
    "bool": "bool",
}


def kind_of(path: str) -> str:
    """The path of a module without the numbers of its layers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


class StorageTape:
    """Follows the storages of a run while it is entered, and knows which module is at work."""

    def __init__(self, recorder: _native.Recorder, model: torch.nn.Module, is_on_host: Callable[[Any], bool]) -> None:
        self.recorder, self.model, self.is_on_host = recorder, model, is_on_host
        self.names = {id(part): name for name, part in model.named_modules()}
        self.alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        # What was born in this forward pass, by its number, and has no other name.
        self.results: dict[int, tuple[str, str | None]] = {}
        self.lasting: dict[int, tuple[str, str, str | None]] = {}
        self.is_over = False
        self.modules: list[str] = []
        self.phase = "load"

    def mark(self, step: int, micro_batch: int | None, phase: str) -> None:
        """What follows belongs there."""
        if self.phase == "forward":
            for number, (name, owner) in self.results.items():
                self.recorder.rename(number, name, owner, "activation", False)
            self.results.clear()
        self.phase = phase
        self.recorder.mark(step, micro_batch, phase)

    def add(
        self, tensor: torch.Tensor, category: str, name: str, owner: str | None, on_host: bool | None = None
    ) -> int:
        """The number of the storage of ``tensor``, which comes to be now if it is not known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive:
            return self.alive[key][0]
        dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        bytes = storage.nbytes()
        whole = bytes == tensor.numel() * tensor.element_size()
        shape = list(tensor.shape) if whole else None
        host = self.is_on_host(tensor) if on_host is None else on_host
        number = self.recorder.alloc(bytes, host, name, owner, category, dtype, shape)
        # PyTorch keeps the storage's Python object for as long as the storage lives.
        self.alive[key] = (number, weakref.ref(storage, lambda _: self.gone(key)))
        return number

    def gone(self, key: int) -> None:
        """The storage is gone."""
        number, _ = self.alive.pop(key, (-1, None))
        if number >= 0 and not self.is_over:
            self.results.pop(number, None)
            self.recorder.free(number)

    def name(self, tensor: torch.Tensor, category: str, name: str, owner: str | None) -> None:
        """What the storage of ``tensor`` is, learnt now."""
        for part in parts_of(tensor):
            number = self.add(part, category, name, owner)
            self.results.pop(number, None)
            self.lasting[number] = (category, name, owner)
            self.recorder.relabel(number, name, owner, category, False)

    def kept(self, tensor: torch.Tensor) -> None:
        """Autograd keeps ``tensor`` for its backward."""
        for part in parts_of(tensor):
            number = self.number(part)
            if number in self.results and self.phase == "forward":
                name, owner = self.results.pop(number)
                self.recorder.rename(number, name, owner, "activation", True)
            elif number in self.lasting:
                category, name, owner = self.lasting[number]
                if category == "input":
                    self.recorder.relabel(number, name, owner, category, True)

    def number(self, tensor: torch.Tensor) -> int:
        """The number of the storage of ``tensor``; -1 where it is not known."""
        number, _ = self.alive.get(tensor.untyped_storage()._cdata, (-1, None))
        return number

    def adopt(self, name: str, gradient: torch.Tensor) -> None:
        """``gradient`` is that of the parameter of that name."""
        if any(self.number(part) not in self.lasting for part in parts_of(gradient)):
            self.name(gradient, "gradient", f"{kind_of(name)}.grad", name.rpartition(".")[0] or None)

    def name_model(self) -> None:
        """Parameters and buffers."""
        for name, buffer in self.model.named_buffers():
            self.name(buffer, "buffer", kind_of(name), name.rpartition(".")[0] or None)
        for name, parameter in self.model.named_parameters():
            self.name(parameter, "parameter", kind_of(name), name.rpartition(".")[0] or None)

    def name_state(self, optimizer: torch.optim.Optimizer) -> None:
        """The state of an optimizer."""
        import torch

        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for parameter, state in optimizer.state.items():
            name = names.get(id(parameter), "parameter")
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    owner = name.rpartition(".")[0] or None
                    self.name(value, "optimizer_state", f"{kind_of(name)}.{key}", owner)

    def born(self, operator: str, tensors: Iterator[torch.Tensor]) -> None:
        """The results of an operator."""
        owner = self.modules[-1] if self.modules else None
        name = ".".join(part for part in (kind_of(owner or ""), operator) if part)
        # A module at work in backward computes its results once more.
        category = "activation" if self.modules and self.phase == "backward" else "temporary"
        for tensor in (part for one in tensors for part in parts_of(one)):
            known = tensor.untyped_storage()._cdata in self.alive
            # `torch.tensor(0.0)`, the counters of optimizers for one, is made on the host.
            on_host = True if operator == "lift_fresh" else None
            number = self.add(tensor, category, name, owner, on_host)
            if not known and self.phase == "forward":
                self.results[number] = (name, owner)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Everything that happens inside is on the tape."""
        import torch
        from torch.nn.modules import module as hooks
        from torch.utils._python_dispatch import TorchDispatchMode

        tape = self

        class Dispatch(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = function(*args, **(kwargs or {}))
                tape.born(str(getattr(function, "overloadpacket", function)).rpartition(".")[2], tensors_in(result))
                return result

        def enter(module: torch.nn.Module, _: Any) -> None:
            self.modules.append(self.names.get(id(module), type(module).__name__))

        def leave(*_: Any) -> None:
            if self.modules:
                self.modules.pop()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.kept(tensor)
            return tensor.detach()

        def adopt(name: str) -> Callable[[torch.Tensor], None]:
            return lambda parameter: None if parameter.grad is None else self.adopt(name, parameter.grad)

        with ExitStack() as stack:
            for handle in (
                hooks.register_module_forward_pre_hook(enter),
                hooks.register_module_forward_hook(leave, always_call=True),
                *(
                    parameter.register_post_accumulate_grad_hook(adopt(name))
                    for name, parameter in self.model.named_parameters()
                    if parameter.requires_grad
                ),
            ):
                stack.callback(handle.remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
            stack.enter_context(Dispatch())
            yield
