"""Marks, phases and recordings of a live run, on the CPU and on the emulated GPU."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import vramledger  # noqa: E402
from test_demonstrations import make_mlp  # noqa: E402


def train(model: Any, optimizer: Any, steps: int = 2, micro: int = 1) -> None:
    for _ in range(steps):
        for _ in range(micro):
            x = torch.ones(32, 64, device=next(model.parameters()).device)
            (model(x).sum() / micro).backward()
        optimizer.step()
        optimizer.zero_grad()


def marks(run: vramledger.Track) -> list[tuple[int, int | None, str]]:
    """The phases, each once."""
    places = [(mark.step, mark.micro_batch, mark.phase) for mark in run.marks]
    return [place for place, before in zip(places, [None, *places]) if place != before]


def test_phases_are_marked_and_seen_by_the_profiler() -> None:
    model = make_mlp(2, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    backward = torch.autograd.backward
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        with vramledger.track(model, optimizer) as run:
            train(model, optimizer, steps=2, micro=2)
            with torch.no_grad():
                model(torch.ones(1, 64))
    step = [(1, "forward"), (1, "backward"), (2, "forward"), (2, "backward"), (None, "update")]
    assert marks(run) == [(0, None, "load"), *((n, micro, phase) for n in (1, 2) for micro, phase in step)]
    assert run.steps == 2 and run.marks[0].allocated_bytes is None
    names = {event.name for event in seen.events()}
    assert {"vramledger.forward", "vramledger.backward", "vramledger.update"} <= names
    # Nothing of it stays.
    assert torch.autograd.backward is backward
    assert not model._forward_pre_hooks and not optimizer._optimizer_step_pre_hooks


def test_phases_of_the_users_own() -> None:
    model = make_mlp(1, 64)
    with vramledger.track(model) as run:
        result = model(torch.ones(1, 64))
        with vramledger.phase("loss"):
            loss = result.sum()
        loss.backward()
    assert [phase for *_, phase in marks(run)] == ["load", "forward", "loss", "forward", "backward"]
    with vramledger.phase("alone"):
        pass


def objects(ledger: vramledger.Ledger, phase: str, step: int) -> Counter[Any]:
    alive = ledger.objects(phase, step=step)
    return Counter((o.category, o.bytes) for o in alive if o.bytes > 4 and o.category != "workspace")


def check(ledger: vramledger.Ledger) -> None:
    plan = vramledger.plan("mlp:2x64", batch=32, loss="sum", optimizer_impl="foreach", steps=2)
    assert ledger.provenance == "measured"
    for phase, step in (("forward", 1), ("backward", 1), ("forward", 2), ("backward", 2), ("update", 2)):
        assert objects(ledger, phase, step) == objects(plan, phase, step), (phase, step)
    owners = {o.owner for o in ledger.objects("forward") if o.category == "activation" and o.bytes > 4}
    assert owners == {"1", "3"}


def test_a_run_on_the_cpu_is_recorded(tmp_path: Path) -> None:
    model = make_mlp(2, 64)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with vramledger.record(tmp_path / "run.vlt", model, optimizer) as recording:
        train(model, optimizer)
    check(recording.ledger)
    read = vramledger.read(tmp_path / "run.vlt")
    assert isinstance(read, vramledger.Ledger) and read.objects() == recording.ledger.objects()


def test_a_run_that_fails_is_recorded_all_the_same(tmp_path: Path) -> None:
    model = make_mlp(2, 64)
    with pytest.raises(KeyError):
        with vramledger.record(tmp_path / "run.vlt", model) as recording:
            model(torch.ones(1, 64)).sum().backward()
            raise KeyError("batch 7")
    assert "the run ended with KeyError: 'batch 7'" in recording.ledger.to_dict()["assumptions"]
    assert (tmp_path / "run.vlt").exists()


ON_A_GPU = """
import sys, torch, vramledger
sys.path.insert(0, sys.argv[1])
from test_tracking import check, make_mlp, train
model = make_mlp(2, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
with vramledger.record(sys.argv[2] + "/run.pickle", model, optimizer) as recording:
    train(model, optimizer)
check(recording.ledger)
assert recording.run.marks[-1].allocated_bytes > 0
"""

OUT_OF_MEMORY = """
import sys, torch, vramledger
model = torch.nn.Linear(64, 1 << 20, bias=False).cuda()
with vramledger.record(sys.argv[2] + "/run.pickle", model):
    model(torch.ones(64, 64, device="cuda")).sum().backward()
"""


def on_a_gpu(script: str, folder: Path, capacity: str = "80GiB") -> subprocess.CompletedProcess[str]:
    """Runs a script on the emulated device, with no recorder but its own."""
    if torch.version.cuda is None or sys.platform != "linux":
        pytest.skip("needs a CUDA build of PyTorch on Linux")
    words = [sys.executable, "-m", "vramledger", "emulate", "--capacity", capacity, "--"]
    words += ["env", "-u", "VRAMLEDGER_RECORD", sys.executable, "-c", script, str(Path(__file__).parent), str(folder)]
    return subprocess.run(words, capture_output=True, text=True)


def test_a_run_on_a_gpu_is_recorded(tmp_path: Path) -> None:
    run = on_a_gpu(ON_A_GPU, tmp_path)
    assert "ended without using the GPU" in run.stderr, run.stderr
    kept = vramledger.read(tmp_path / "run.vlt")
    assert isinstance(kept, vramledger.Ledger) and kept.peak("requested")
    # PyTorch's own recording is beside it, and its entries say where they were made.
    snapshot = vramledger.read(tmp_path / "run.pickle")
    assert isinstance(snapshot, vramledger.Ledger) and snapshot.provenance == "measured"


def test_a_run_out_of_memory_is_recorded(tmp_path: Path) -> None:
    run = on_a_gpu(OUT_OF_MEMORY, tmp_path, capacity="1GiB")
    assert "OutOfMemoryError" in run.stderr, run.stderr
    read = vramledger.read(tmp_path / "run.vlt")
    assert isinstance(read, vramledger.Ledger)
    oom = read.to_dict()["oom"]
    assert (oom["phase"], oom["requested_bytes"]) == ("forward", 64 << 22)
    assert {o.name for o in read.objects("load", step=0) if o.category == "parameter"} == {"weight"}
