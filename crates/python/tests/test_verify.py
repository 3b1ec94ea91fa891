"""Planted mistakes in accumulation, checkpointing and offload are caught, with their place."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import vramledger  # noqa: E402


def batch_of(rows: int, width: int = 32) -> Any:
    torch.manual_seed(1)
    return torch.randn(rows, width), torch.randn(rows, width)


def loss_fn(model: Any, batch: Any) -> Any:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def two_layers(*between: Any) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 32), *between, torch.nn.Linear(32, 32))


def test_an_undivided_loss_is_caught() -> None:
    def forgets(model: Any, parts: Any) -> None:
        for part in parts:
            loss_fn(model, part).backward()

    report = vramledger.verify_accumulation(two_layers(), loss_fn, batch_of(8), accumulate=forgets)
    assert not report and report.reasons[0].startswith("every gradient is 4 times too large")
    assert all(math.isclose(row.ratio, 4, rel_tol=1e-4) for row in report.rows)
    summed = vramledger.verify_accumulation(
        two_layers(), lambda model, batch: loss_fn(model, batch) * len(batch[0]), batch_of(8)
    )
    assert not summed and "the loss is a sum" in summed.reasons[0]


def test_a_forgotten_part_is_caught_where_it_is() -> None:
    def forgets(model: Any, parts: Any) -> None:
        for part in parts:
            (loss_fn(model, part) / len(parts)).backward()
            model[0].bias.grad = None

    report = vramledger.verify_accumulation(two_layers(), loss_fn, batch_of(8), accumulate=forgets)
    assert not report and report.where == "0.bias" and report.largest_difference == math.inf


def test_a_batch_norm_is_caught_and_left_as_it_was() -> None:
    model = two_layers(torch.nn.BatchNorm1d(32))
    report = vramledger.verify_accumulation(model, loss_fn, batch_of(16))
    reason = "`1` normalises with the statistics of each part: a batch norm sees 4 batches"
    assert not report and report.reasons == (reason,)
    assert model[1].num_batches_tracked == 0 and model[0].weight.grad is None


def test_a_mean_over_padded_tokens_is_caught() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 5)
    x, labels = torch.randn(8, 6, 8), torch.randint(0, 5, (8, 6))
    labels[0, 1:] = -100

    def tokens(model: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())

    report = vramledger.verify_accumulation(model, tokens, {"x": x, "labels": labels}, micro=4)
    assert not report and report.reasons[0].startswith("the parts have 7, 12, 12, 12 labels that count")
    even = vramledger.verify_accumulation(model, tokens, {"x": x[1:5], "labels": labels[1:5]}, micro=4)
    assert even


def test_a_batch_that_cannot_be_divided_is_an_error() -> None:
    with pytest.raises(vramledger.MeasureError, match="6 samples cannot be divided into 4 equal parts"):
        vramledger.verify_accumulation(two_layers(), loss_fn, batch_of(6))
    with pytest.raises(vramledger.MeasureError, match="no first dimension in common"):
        vramledger.verify_accumulation(two_layers(), loss_fn, (torch.ones(4, 32), torch.ones(2, 32)))


class Dropping(torch.nn.Module):  # type: ignore[name-defined,misc]
    def __init__(self) -> None:
        super().__init__()
        layers = (torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.5)) for _ in range(3))
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: Any, preserve: bool | None = None) -> Any:
        from torch.utils.checkpoint import checkpoint

        for layer in self.layers:
            x = layer(x) if preserve is None else checkpoint(
                layer, x, use_reentrant=False, preserve_rng_state=preserve
            )
        return x


def test_dropout_without_its_random_state_is_caught() -> None:
    torch.manual_seed(0)
    model, (x, _) = Dropping(), batch_of(8)
    assert vramledger.verify_checkpointing(model, x, checkpointed=lambda x: model(x, preserve=True))
    report = vramledger.verify_checkpointing(model, x, checkpointed=lambda x: model(x, preserve=False))
    assert not report and report.where.startswith("layers.")
    reason = "`layers.0.1` and 2 more draws another mask than before: its random state is not what it was"
    assert report.reasons == (reason,)


def test_the_generator_and_the_gradients_are_left_as_they_were() -> None:
    model, (x, _) = Dropping(), batch_of(8)
    model(x).sum().backward()
    gradient, state = model.layers[0][0].weight.grad, torch.get_rng_state()
    assert vramledger.verify_checkpointing(model, x)
    assert model.layers[0][0].weight.grad is gradient
    assert torch.equal(torch.get_rng_state(), state)
    assert "forward" not in vars(model.layers[0])


def test_an_offload_that_rounds_is_caught() -> None:
    model, (x, _) = two_layers(torch.nn.Tanh()), batch_of(8)
    report = vramledger.verify_offload(model, x)
    assert report and report.figures["moved_bytes"] > report.figures["saved_bytes"] > 0

    def rounds() -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float())

    report = vramledger.verify_offload(model, x, offload=rounds)
    assert not report and report.where in dict(model.named_parameters())


def test_a_report_is_a_table() -> None:
    report = vramledger.verify_offload(two_layers(), batch_of(8)[0])
    assert str(report).startswith("offload keeps the gradients") and "<table>" in report._repr_html_()
    assert report.to_dict()["rows"][0]["parameter"] in dict(two_layers().named_parameters())
