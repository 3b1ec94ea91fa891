"""A training step on fake tensors: the tape of any model, without a GPU and without its memory."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from vramledger import _native
from vramledger.documents import Ledger, wrap
from vramledger.errors import MeasureError
from vramledger.storages import StorageTape
from vramledger.tensors import mapped, tensors_in
from vramledger.verify import _default_loss

if TYPE_CHECKING:
    import torch

    Optimizers = Callable[[Any], torch.optim.Optimizer]

ASSUMPTIONS = [
    "the operators are those of the host: attention runs another kernel than on a GPU and keeps other statistics",
    "what lives inside one operator, workspaces for one, is not seen",
]


def capture(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    inputs: Any,
    optimizer: torch.optim.Optimizer | Optimizers | None = None,
    *,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    steps: int = 2,
    accumulate: int = 1,
    gpu: str = "H100-80GB",
    capacity: int | None = None,
    context: int | None = None,
    alloc_conf: str = "",
    name: str | None = None,
) -> Ledger:
    """Runs ``steps`` training steps on fake tensors and gives their ledger, as if all were on one GPU.

    Nothing is computed and no memory is taken for tensors: it works for models that ``plan`` does not know, on any
    machine and with any build of PyTorch. ``model`` is a module (of which a fake copy is made) or a function that makes
    one of its final dtype, for those that do not fit in memory. ``inputs`` are the model's arguments: a tensor, a list,
    or a mapping by name. ``optimizer`` is an optimizer of ``model``, or what makes one of parameters
    (``torch.optim.AdamW``); without one there is no update. ``loss_fn(model, inputs)`` is the loss [default: the
    ``loss`` of the result, else the sum of its tensors]. Raises ``MeasureError`` where the step needs values, which
    fake tensors do not have.
    """
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    if steps < 1 or accumulate < 1:
        raise MeasureError("`steps` and `accumulate` are 1 or more")
    recorder = _native.Recorder(gpu, capacity, context)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake = _fake_model(model, mode)
        tape = StorageTape(recorder, fake, is_on_host=lambda tensor: False)
        tape.mark(0, None, "load")
        tape.name_model()
        made = _optimizer(optimizer, fake)
        loss = loss_fn or _default_loss
        try:
            with _dropout_of_gpus(), tape.followed():
                _run(tape, fake, inputs, made, loss, steps, accumulate)
        except DataDependentOutputException as error:
            raise MeasureError(
                f"the step needs the value of a tensor, which a fake one does not have: {error}",
                "`vramledger emulate` runs such programs",
            ) from error
        parameters = list(fake.parameters())
        counted = (
            sum(parameter.numel() for parameter in parameters),
            sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        )
        called = name or type(fake).__name__
        subject = {
            "model": {"name": called},
            "setup": {"optimizer": type(made).__name__ if made else None, "steps": steps, "accumulate": accumulate},
            "software": {"torch": torch.__version__},
        }
        native = recorder.finish(called, json.dumps(subject), counted, ASSUMPTIONS, alloc_conf)
    return cast(Ledger, wrap(native))


def _run(
    tape: StorageTape,
    model: torch.nn.Module,
    inputs: Any,
    optimizer: torch.optim.Optimizer | None,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    steps: int,
    accumulate: int,
) -> None:
    """The loop of a training script."""
    for step in range(1, steps + 1):
        for micro_batch in range(1, accumulate + 1):
            tape.mark(step, micro_batch, "forward")
            batch = _fake(inputs)
            for tensor in tensors_in(batch):
                tape.name(tensor, "input", "input", None)
            loss = loss_fn(model, batch)
            if accumulate > 1:
                loss = loss / accumulate
            tape.mark(step, micro_batch, "backward")
            loss.backward()
        tape.mark(step, None, "update")
        if optimizer is not None:
            optimizer.step()
            tape.name_state(optimizer)
            optimizer.zero_grad()
        else:
            model.zero_grad()
    # What the loop still has goes with it, and not in the last step.
    tape.is_over = True


def _fake_model(model: Any, mode: Any) -> torch.nn.Module:
    import torch
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor

    if not isinstance(model, torch.nn.Module):
        return cast("torch.nn.Module", model())
    if any(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
        raise MeasureError("the model has fake tensors of another mode: give the function that makes it")
    with FakeCopyMode(mode):
        fake = copy.deepcopy(model)
    for parameter in fake.parameters():
        parameter.grad = None
    return cast("torch.nn.Module", fake)


def _optimizer(optimizer: Any, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    """An optimizer of the fake parameters, which steps all of them at once as on a GPU."""
    import torch

    if optimizer is None:
        return None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(optimizer, torch.optim.Optimizer):
        takes = inspect.signature(type(optimizer)).parameters
        options: dict[str, Any] = {key: value for key, value in optimizer.defaults.items() if key in takes}
        made = type(optimizer)(trained, **options)
    else:
        made = cast("torch.optim.Optimizer", optimizer(trained))
    for group in made.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
    return made


def _fake(value: Any) -> Any:
    """Fake tensors in place of those in ``value``, one for each."""
    import torch

    made: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> Any:
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, requires_grad=tensor.requires_grad
            )
        return made[id(tensor)]

    return mapped(value, fake)


@contextmanager
def _dropout_of_gpus() -> Iterator[None]:
    """Dropout with the kernel of GPUs, which keeps a mask of booleans, wherever it is called by its full name.

    A mode would not do: it is off inside of ``backward``, where checkpointed layers run again.
    """
    import torch

    functional = torch.nn.functional
    plain = functional.dropout

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if training and 0 < p < 1 and not inplace:
            return torch.native_dropout(input, p, True)[0]
        return plain(input, p, training, inplace)

    functional.dropout = dropout
    try:
        yield
    finally:
        functional.dropout = plain
