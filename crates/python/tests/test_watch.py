"""A run that grows is told of, with what grows and who holds it; one that does not is not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import vramledger  # noqa: E402


def train(watch: vramledger.Watch, steps: int, keep: Any) -> None:
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        loss = model(torch.ones(2, 16)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        keep(loss)
        watch.step()


def test_losses_that_are_kept_are_named() -> None:
    losses: list[Any] = []
    with pytest.warns(vramledger.GrowthWarning) as caught:
        train(vramledger.watch(every=4), 24, losses.append)
    text = str(caught[0].message)
    assert "12 more tensors of scalar float32, each with its graph (SumBackward0)" in text
    assert "held by `losses in test_watch.test_losses_that_are_kept_are_named`" in text
    assert "keep `loss.item()`" in text


def test_attributes_are_holders_too() -> None:
    class Meter:
        def __init__(self) -> None:
            self.history: list[Any] = []

    meter = Meter()
    told: list[str] = []
    train(vramledger.watch(every=2, notify=told.append), 20, lambda loss: meter.history.append(loss.detach()))
    assert told and "`meter.history in test_watch.test_attributes_are_holders_too`" in told[0]
    assert "item()" not in told[0]


def test_a_steady_run_is_left_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch = vramledger.watch(every=2)
        train(watch, 20, lambda loss: loss.item())
    assert watch.warnings == [] and len(watch.windows) == 10
    assert str(watch).startswith("nothing grows in 20 steps")


def test_a_trainer_takes_it() -> None:
    transformers = pytest.importorskip("transformers")
    watch = vramledger.watch(every=1)
    callback = watch.callback()
    assert isinstance(callback, transformers.TrainerCallback)
    callback.on_step_end(None, None, None)
    assert watch.steps == 1
