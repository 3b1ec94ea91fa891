"""What PyTorch does, measured, and the same figures from the engine: the demonstrations that the package grew from."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import vramledger  # noqa: E402


def make_mlp(layers: int, width: int) -> Any:
    parts: list[Any] = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width, bias=False), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts)


def kept(plan: vramledger.Ledger) -> int:
    """Bytes that autograd keeps at the end of the planned forward pass."""
    return sum(object.bytes for object in plan.objects("forward") if object.saved and object.category != "parameter")


@pytest.mark.parametrize(("layers", "batch"), [(4, 32), (8, 32), (8, 64), (16, 64)])
def test_saved_activations_of_an_mlp(layers: int, batch: int) -> None:
    width = 512
    model, x = make_mlp(layers, width), torch.randn(batch, width)
    measured = vramledger.saved_tensors(lambda: model(x), model)
    assert measured.activation_bytes == (layers + 1) * batch * width * 4
    # The weight of the first layer is not wanted: nobody asks for the gradient of x.
    assert measured.parameter_bytes == (layers - 1) * width * width * 4
    plan = vramledger.plan(f"mlp:{layers}x{width}", batch=batch, loss="sum")
    assert kept(plan) == measured.activation_bytes
    # The same objects: the input, and a result of each layer.
    assert [row.bytes for row in measured.activations] == [o.bytes for o in plan.objects() if o.saved]
    assert [row.operator for row in measured.activations] == ["mm"] + ["relu"] * layers


def test_parameters_may_be_given_one_by_one() -> None:
    model, x = make_mlp(4, 64), torch.randn(8, 64)
    measured = vramledger.saved_tensors(lambda: model(x), list(model.parameters()))
    assert measured.activation_bytes == 5 * 8 * 64 * 4


def test_what_is_let_go_of_does_not_count() -> None:
    model, x = make_mlp(2, 64), torch.randn(8, 64)

    def twice() -> Any:
        model(x)
        return model(x)

    assert vramledger.saved_tensors(twice, model).activation_bytes == 3 * 8 * 64 * 4


def test_sparse_tensors_have_their_parts() -> None:
    table = torch.nn.Embedding(50, 8, sparse=True)
    ids = torch.arange(6)
    optimizer = torch.optim.SparseAdam(table.parameters())
    with vramledger.track(table, optimizer):
        measured = vramledger.saved_tensors(lambda: table(ids), table)
        measured.result.sum().backward()
        optimizer.step()
    assert measured.activation_bytes == 6 * 8
    captured = vramledger.capture(torch.nn.Embedding(50, 8), ids)
    assert [o.bytes for o in captured.objects() if o.saved] == [6 * 8]


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_adamw_makes_its_state_in_the_first_step(implementation: str) -> None:
    model = make_mlp(4, 256)
    parameters = 4 * 256 * 256 * 4
    options: dict[str, Any] = {implementation: True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    before = vramledger.optimizer_state(optimizer, model)
    assert (before.bytes, before.created, before.lazy) == (0, False, True)
    assert before.missing == ("0.weight", "2.weight", "4.weight", "6.weight")
    model(torch.randn(8, 256)).sum().backward()
    optimizer.step()
    after = vramledger.optimizer_state(optimizer, model)
    assert after.bytes == 2 * parameters + 4 * 4
    assert f"{after.bytes / after.parameter_bytes:.2f}" == "2.00"
    assert after.by_key() == {"step": 16, "exp_avg": parameters, "exp_avg_sq": parameters}
    assert after.missing == ()
    plan = vramledger.plan("mlp:4x256", batch=8, optimizer_impl=implementation, loss="sum")
    state = [o for o in plan.objects("update") if o.category == "optimizer_state"]
    on_host = 16 if implementation == "foreach" else 0
    assert sum(o.bytes for o in state if o.device != "host") == after.bytes - on_host
    assert not [o for o in plan.objects("backward") if o.category == "optimizer_state"]


def test_adagrad_makes_its_state_at_once() -> None:
    state = vramledger.optimizer_state(torch.optim.Adagrad(make_mlp(1, 8).parameters()))
    assert (state.created, state.lazy) == (True, False)


WHERE = """
import json, sys, torch, vramledger
found = {}
for implementation in ("foreach", "fused"):
    layer = torch.nn.Linear(16, 16, bias=False, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters(), **{implementation: True})
    layer(torch.ones(2, 16, device="cuda")).sum().backward()
    optimizer.step()
    found[implementation] = vramledger.optimizer_state(optimizer).by_device()
print("found " + json.dumps(found), file=sys.stderr)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the emulated GPU needs Linux")
def test_counters_are_on_the_device_when_fused_and_on_the_host_when_not() -> None:
    if torch.version.cuda is None:
        pytest.skip("needs a CUDA build of PyTorch")
    words = [sys.executable, "-m", "vramledger", "emulate", "--steps", "all", "--", sys.executable, "-c", WHERE]
    run = subprocess.run(words, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    line = next(line for line in run.stderr.splitlines() if line.startswith("found "))
    moments = 2 * 16 * 16 * 4
    assert json.loads(line.removeprefix("found ")) == {
        "foreach": {"cpu": 4, "cuda:0": moments},
        "fused": {"cuda:0": moments + 4},
    }


def loss_fn(model: Any, batch: Any) -> Any:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def test_accumulation_keeps_the_gradients_with_a_quarter_of_the_activations() -> None:
    torch.manual_seed(0)
    model = make_mlp(4, 128)
    batch = (torch.randn(64, 128), torch.randn(64, 128))
    report = vramledger.verify_accumulation(model, loss_fn, batch, micro=4)
    assert report and report.largest_difference < 1e-8
    assert report.figures["saved_bytes"] == 6 * 64 * 128 * 4
    assert report.figures["saved_bytes_of_a_part"] * 4 == report.figures["saved_bytes"]
    # The engine's loss is of the result alone: the difference from the target is one result more.
    for rows, name in ((64, "saved_bytes"), (16, "saved_bytes_of_a_part")):
        plan = vramledger.plan("mlp:4x128", batch=rows, accumulate=64 // rows)
        assert kept(plan) + rows * 128 * 4 == report.figures[name]


def test_checkpointing_costs_one_forward_more() -> None:
    torch.manual_seed(0)
    layers, width, batch = 16, 256, 32
    blocks = torch.nn.Sequential(*(make_mlp(1, width) for _ in range(layers)))
    report = vramledger.verify_checkpointing(blocks, torch.randn(batch, width))
    forward = 2 * batch * width * width * layers
    assert report and report.figures["forward_flops"] == forward
    assert f"{report.figures['forwards']:.2f}" == "2.94"
    assert f"{report.figures['forwards_checkpointed']:.2f}" == "3.94"
    assert report.figures["flops_checkpointed"] - report.figures["flops"] == forward
    for checkpoint, name in (("none", ""), ("full", "_checkpointed")):
        plan = vramledger.plan("mlp:16x256", batch=batch, loss="sum", checkpoint=checkpoint)
        flops = plan.to_dict()["flops"]
        assert flops["forward"] == forward
        assert flops["forward"] + flops["backward"] + flops["recompute"] == report.figures[f"flops{name}"]
        assert kept(plan) == report.figures[f"saved_bytes{name}"]
