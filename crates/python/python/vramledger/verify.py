"""Whether a strategy that saves memory keeps the meaning of a training step: the gradients stay equal, up to rounding.

Each check runs the step as it is and with the strategy, from the same state of the generators, and leaves gradients,
buffers and generators of the model as they were.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vramledger.errors import MeasureError
from vramledger.saved import SavedTensors, saved_tensors
from vramledger.tables import Table, rows_of
from vramledger.tensors import mapped, tensors_in

if TYPE_CHECKING:
    import torch

    Model = Callable[..., Any]
    Loss = Callable[[Model, Any], torch.Tensor]

# Labels of this value count in no loss of PyTorch.
IGNORED = -100


@dataclass(frozen=True)
class GradientDifference:
    """The gradient of one parameter, as it is and with the strategy."""

    parameter: str
    largest_difference: float
    """The largest absolute difference of an element; infinite where one side has no gradient."""
    relative: float
    """The difference in units of the gradient, each as a root mean square."""
    ratio: float
    """The gradient with the strategy in units of the one without: their projection."""


@dataclass(frozen=True)
class Verification(Table):
    """Whether the gradients stay equal, and where they differ most. True where they do."""

    strategy: str
    equal: bool
    """Whether every gradient is equal up to ``tolerance``."""
    largest_difference: float
    """The largest absolute difference of an element of a gradient."""
    where: str
    """The parameter that differs most, relative to its gradient."""
    tolerance: float
    """The relative difference that rounding may make, for the dtype of the gradients."""
    reasons: tuple[str, ...]
    """What makes them differ, a sentence each; empty where they are equal or nothing is known."""
    figures: Mapping[str, float]
    """What the strategy costs and saves: bytes of saved activations, FLOPs, passes."""
    rows: tuple[GradientDifference, ...]
    """Every parameter, the one that differs most first."""

    def __bool__(self) -> bool:
        return self.equal

    def _head(self) -> str:
        verdict = "keeps the gradients" if self.equal else f"changes the gradients, most that of `{self.where}`"
        lines = [f"{self.strategy} {verdict}: the largest difference is {self.largest_difference:.3g}"]
        lines += [f"- {reason}" for reason in self.reasons]
        lines += [f"{name.replace('_', ' ')}: {value:,.10g}" for name, value in self.figures.items()]
        return "\n".join(lines)

    def _table(self) -> list[dict[str, Any]]:
        return rows_of(self.rows)


def verify_accumulation(
    model: torch.nn.Module,
    loss_fn: Loss,
    batch: Any,
    micro: int = 4,
    *,
    accumulate: Callable[[torch.nn.Module, Sequence[Any]], Any] | None = None,
) -> Verification:
    """Whether ``micro`` parts of ``batch`` give the gradients of the whole.

    ``loss_fn(model, batch)`` is the loss of a batch: a tensor, a list or a mapping of tensors whose first dimension is
    the samples. ``accumulate(model, parts)`` is the loop that is checked; without one, each part's loss divided by
    ``micro`` is backpropagated. Raises ``MeasureError`` for a batch that cannot be divided.
    """
    parts = _parts(batch, micro)
    figures: dict[str, float] = {}
    with _kept(model) as again:
        again()
        whole = saved_tensors(lambda: loss_fn(model, batch), model)
        whole.result.backward()
        figures["saved_bytes"] = whole.activation_bytes
        before = _gradients(model)
        again()
        part = saved_tensors(lambda: loss_fn(model, parts[0]), model)
        figures["saved_bytes_of_a_part"] = part.activation_bytes
        del whole, part
        again()
        if accumulate is not None:
            accumulate(model, parts)
        else:
            for one in parts:
                (loss_fn(model, one) / micro).backward()
        after = _gradients(model)
        figures["micro_batches"] = micro
    return _verdict("accumulation", before, after, figures, lambda rows: _accumulation(model, batch, parts, rows))


def verify_checkpointing(
    model: torch.nn.Module,
    batch: Any,
    loss_fn: Loss | None = None,
    *,
    checkpointed: Model | None = None,
) -> Verification:
    """Whether recomputing layers in backward keeps the gradients, what it saves, and what it costs.

    ``checkpointed(batch…)`` is the pass of the same parameters that is checked; without one, that of the model after
    its ``gradient_checkpointing_enable()``, or of its repeated layers under ``torch.utils.checkpoint``.
    ``loss_fn(model, batch)`` is the loss [default: the ``loss`` of the result, else the sum of its tensors].
    """
    from torch.utils.flop_counter import FlopCounterMode

    loss = loss_fn or _default_loss
    figures: dict[str, float] = {}
    gradients: list[dict[str, torch.Tensor | None]] = []
    with _kept(model) as again:
        again()
        with FlopCounterMode(display=False) as counter:
            loss(model, batch)
        forward = counter.get_total_flops()
        figures["forward_flops"] = forward
        for name in ("", "_checkpointed"):
            again()
            with contextlib.ExitStack() as stack:
                run = stack.enter_context(_checkpointed(model, checkpointed)) if name else model
                counter = stack.enter_context(FlopCounterMode(display=False))
                kept: SavedTensors[torch.Tensor] = saved_tensors(lambda: loss(run, batch), model)
                kept.result.backward()
            figures[f"saved_bytes{name}"] = kept.activation_bytes
            figures[f"flops{name}"] = counter.get_total_flops()
            figures[f"forwards{name}"] = counter.get_total_flops() / forward if forward else math.nan
            del kept
            gradients.append(_gradients(model))
        figures["saved_bytes_less"] = figures["saved_bytes"] - figures["saved_bytes_checkpointed"]
    before, after = gradients
    return _verdict("checkpointing", before, after, figures, lambda rows: _random(model))


def verify_offload(
    model: torch.nn.Module,
    batch: Any,
    loss_fn: Loss | None = None,
    *,
    offload: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
) -> Verification:
    """Whether keeping saved tensors in host memory keeps the gradients, and what is moved.

    ``offload()`` is the context around the forward pass that is checked [default:
    ``torch.autograd.graph.save_on_cpu``].
    ``moved_bytes`` are those of every tensor that is saved, once for each operator that saves it.
    """
    import torch

    loss = loss_fn or _default_loss
    context = offload or torch.autograd.graph.save_on_cpu
    figures: dict[str, float] = {}
    moved = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.numel() * tensor.element_size())
        return tensor

    with _kept(model) as again:
        again()
        whole = saved_tensors(lambda: loss(model, batch), model)
        whole.result.backward()
        figures["saved_bytes"] = whole.activation_bytes
        del whole
        before = _gradients(model)
        again()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss(model, batch)
        figures["moved_bytes"] = sum(moved)
        again()
        with context():
            value = loss(model, batch)
        value.backward()
        after = _gradients(model)
    return _verdict("offload", before, after, figures, lambda rows: _random(model))


def _default_loss(model: Model, batch: Any) -> torch.Tensor:
    if isinstance(batch, Mapping):
        result = model(**batch)
    elif isinstance(batch, (list, tuple)):
        result = model(*batch)
    else:
        result = model(batch)
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if loss is not None:
        return loss
    floats = [tensor for tensor in tensors_in(result) if tensor.is_floating_point() and tensor.requires_grad]
    if not floats:
        raise MeasureError("the model's result has no tensor with a gradient: give `loss_fn`")
    return sum((tensor.float().sum() for tensor in floats[1:]), floats[0].float().sum())


def _parts(batch: Any, micro: int) -> list[Any]:
    """``batch`` in equal parts along the samples."""
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()}
    if len(sizes) != 1:
        raise MeasureError("the tensors of the batch have no first dimension in common, the samples")
    (size,) = sizes
    if micro < 1 or size % micro:
        raise MeasureError(f"{size} samples cannot be divided into {micro} equal parts")

    def part(index: int) -> Any:
        # Of its own, so that a part is not a view that keeps all of the batch.
        return mapped(batch, lambda tensor: tensor.chunk(micro)[index].clone() if tensor.dim() else tensor)

    return [part(index) for index in range(micro)]


@contextlib.contextmanager
def _kept(model: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Keeps what a run changes, and puts it back; gives a function that makes every run begin alike."""
    import torch

    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = sorted({tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}, key=str)
    with torch.random.fork_rng(devices=devices):
        state = torch.get_rng_state()
        on_devices = [torch.cuda.get_rng_state(device) for device in devices]

        def again() -> None:
            torch.set_rng_state(state)
            for device, one in zip(devices, on_devices):
                torch.cuda.set_rng_state(one, device)
            for parameter in model.parameters():
                parameter.grad = None
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

        try:
            yield again
        finally:
            again()
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Gradients by the name of their parameter, where one is trained."""
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {name: None if one.grad is None else one.grad.detach().clone() for name, one in trained}


def _verdict(
    strategy: str,
    before: dict[str, torch.Tensor | None],
    after: dict[str, torch.Tensor | None],
    figures: dict[str, float],
    reasons: Callable[[Sequence[GradientDifference]], list[str]],
) -> Verification:
    import torch

    known = [gradient for gradient in before.values() if gradient is not None]
    if not known:
        raise MeasureError("no parameter has a gradient after the step")
    elements = sum(gradient.numel() for gradient in known)
    # What is 0 but for rounding is held against the other gradients.
    floor = 1e-3 * math.sqrt(sum(float(one.double().square().sum()) for one in known) / max(elements, 1))
    tolerance = min(64 * max(torch.finfo(one.dtype).eps for one in known), 0.05)
    rows = sorted((_row(name, one, after[name], floor) for name, one in before.items()), key=lambda row: -row.relative)
    equal = rows[0].relative <= tolerance
    return Verification(
        strategy=strategy,
        equal=equal,
        largest_difference=max(row.largest_difference for row in rows),
        where=rows[0].parameter,
        tolerance=tolerance,
        reasons=() if equal else tuple(reasons(rows)),
        figures=figures,
        rows=tuple(rows),
    )


def _row(name: str, before: torch.Tensor | None, after: torch.Tensor | None, floor: float) -> GradientDifference:
    if before is None or after is None:
        same = before is after
        return GradientDifference(name, 0.0 if same else math.inf, 0.0 if same else math.inf, math.nan)
    one, other = before.double(), after.double()
    difference = (one - other).abs()
    if not one.numel():
        return GradientDifference(name, 0.0, 0.0, 1.0)
    finite = bool(difference.isfinite().all())
    scale = max(float(one.square().mean().sqrt()), floor, 1e-300)
    square = float(one.square().sum())
    return GradientDifference(
        parameter=name,
        largest_difference=float(difference.max()) if finite else math.inf,
        relative=float(difference.square().mean().sqrt()) / scale if finite else math.inf,
        ratio=float((one * other).sum()) / square if square else math.nan,
    )


def _accumulation(
    model: torch.nn.Module, batch: Any, parts: Sequence[Any], rows: Sequence[GradientDifference]
) -> list[str]:
    """Why parts give other gradients than the whole."""
    import torch

    reasons = []
    micro = len(parts)
    ratios = [row.ratio for row in rows if math.isfinite(row.ratio)]
    if ratios and all(abs(ratio / micro - 1) < 1e-3 for ratio in ratios):
        reasons.append(f"every gradient is {micro} times too large: the loss of a part is not divided by {micro}")
    if ratios and all(abs(ratio * micro - 1) < 1e-3 for ratio in ratios):
        reasons.append(f"every gradient is {micro} times too small: the loss is a sum, which is not to be divided")
    for name, module in model.named_modules():
        # The base of batch norms has no public name.
        if any(base.__name__ == "_BatchNorm" for base in type(module).__mro__) and module.training:
            reasons.append(f"`{name}` normalises with the statistics of each part: a batch norm sees {micro} batches")
    counts = [_counted(part) for part in parts]
    if any(count is not None for count in counts) and len(set(counts)) > 1:
        told = ", ".join(str(count) for count in counts)
        reasons.append(f"the parts have {told} labels that count: the mean over each part weighs them alike")
    return reasons + _random(model)


def _counted(part: Any) -> int | None:
    """The labels of a part that are not to be ignored, where some are."""
    labels = [tensor for tensor in tensors_in(part) if not tensor.is_floating_point() and (tensor == IGNORED).any()]
    whole = [tensor for tensor in tensors_in(part) if not tensor.is_floating_point()]
    if labels:
        return sum(int((tensor != IGNORED).sum()) for tensor in labels)
    return max((tensor.numel() for tensor in whole), default=None)


def _random(model: torch.nn.Module) -> list[str]:
    """Layers that draw numbers."""
    drops = [
        name
        for name, module in model.named_modules()
        if "dropout" in type(module).__name__.lower() and module.training and getattr(module, "p", 0) > 0
    ]
    if not drops:
        return []
    more = f" and {len(drops) - 1} more" if len(drops) > 1 else ""
    return [f"`{drops[0]}`{more} draws another mask than before: its random state is not what it was"]


@contextlib.contextmanager
def _checkpointed(model: torch.nn.Module, given: Model | None) -> Iterator[Model]:
    """The model with layers that run again in backward."""
    import torch
    from torch.utils.checkpoint import checkpoint

    if given is not None:
        yield given
        return
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if callable(enable):
        was = bool(getattr(model, "is_gradient_checkpointing", False))
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            yield model
        finally:
            disable = getattr(model, "gradient_checkpointing_disable", None)
            if not was and callable(disable):
                disable()
        return
    lists = (m for m in model.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential)))
    layers = list(max(lists, key=len, default=()))
    if not layers:
        raise MeasureError("the model has no list of layers to checkpoint: give `checkpointed`")
    for layer in layers:
        plain = layer.forward
        layer.forward = lambda *a, _plain=plain, **k: checkpoint(_plain, *a, use_reentrant=False, **k)
    try:
        yield model
    finally:
        for layer in layers:
            del layer.forward
