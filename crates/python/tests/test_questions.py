"""plan, read, compare, reconcile, simulate: the same answers as the command line, as typed objects."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import vramledger
from vramledger import Ledger, _native
from vramledger.settings import Settings

MLP = "mlp:4x512"

STATES = [
    {
        "name": name,
        "category": category,
        "size_mb": size,
        "start_phase": start,
        "end_phase": end,
        "device": "gpu",
        "persistent": False,
    }
    for name, category, size, start, end in [
        ("parameters", "parameter", 400.0, "load", "zero_grad"),
        ("activations", "activation", 300.0, "forward", "backward"),
        ("gradients", "gradient", 400.0, "backward", "update"),
    ]
]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "vramledger", *words], capture_output=True, text=True)


def test_a_plan_is_that_of_the_command_line() -> None:
    planned = vramledger.plan(MLP, batch=32, optimizer="adamw", checkpoint="full")
    said = command("plan", MLP, "--batch", "32", "--optimizer", "adamw", "--checkpoint", "full")
    assert str(planned) == said.stdout
    as_json = command("plan", MLP, "--batch=32", "--optimizer=adamw", "--checkpoint=full", "--format=json")
    assert planned.to_json() == as_json.stdout
    assert planned.to_dict() == json.loads(as_json.stdout)
    assert planned.fits is True and as_json.returncode == 0
    assert planned.peak("requested") == sum(planned.by_category().values())


def test_every_setting_of_the_command_line_has_a_type() -> None:
    assert [key.replace("_", "-") for key in Settings.__annotations__] == _native.setting_keys()


def test_lists_switches_and_sizes_are_settings() -> None:
    planned = vramledger.plan(MLP, batch=2, capacity="1GiB", context=1 << 20, amsgrad=True, nesterov=False)
    device = planned.to_dict()["devices"][0]
    assert (device["capacity_bytes"], device["context_bytes"]) == (1 << 30, 1 << 20)
    one = vramledger.plan("gpt2", seqs=[8, 16], steps=2, freeze=["wte", "wpe"])
    assert one.to_dict()["subject"]["setup"]["seqs"] == [8, 16]


def test_errors_are_one_tree() -> None:
    with pytest.raises(vramledger.SetupError, match="no model is called `llama3-8b`") as caught:
        vramledger.plan("llama3-8b")
    assert caught.value.hint and "llama-3-8b" in caught.value.hint
    with pytest.raises(vramledger.SetupError, match="`btach` of `plan` is an unknown key"):
        vramledger.plan(MLP, btach=1)  # type: ignore[call-arg]
    with pytest.raises(vramledger.SetupError):
        vramledger.plan(MLP, batch=0)
    with pytest.raises(vramledger.ReadError, match="failed to read `missing.pickle`"):
        vramledger.read("missing.pickle")
    with pytest.raises(vramledger.ComparisonError):
        vramledger.compare(vramledger.plan(MLP))
    assert issubclass(vramledger.SetupError, vramledger.Error) and issubclass(vramledger.Error, Exception)


def test_states_are_compared_and_reconciled() -> None:
    checkpoint = [dict(state) for state in STATES]
    checkpoint[1]["end_phase"] = "forward"
    compared = vramledger.compare(STATES, checkpoint=checkpoint)
    assert compared.candidates[0]["saving_bytes"] == 300 << 20
    mib = 1 << 20
    held = vramledger.reconcile(STATES, allocated=1103 * mib, reserved=1110 * mib, capacity=1111 * mib)
    assert held.estimate_difference_bytes == 3 * mib
    with pytest.raises(TypeError):
        vramledger.reconcile(STATES)


def test_a_tape_is_kept_read_and_simulated(tmp_path: Path) -> None:
    planned = vramledger.plan(MLP, batch=32)
    planned.save(tmp_path / "run.vlt")
    kept = vramledger.read(tmp_path / "run.vlt")
    assert isinstance(kept, Ledger) and kept.name == "run"
    assert kept.objects() == planned.objects()
    simulated = vramledger.simulate(tmp_path / "run.vlt", alloc_conf=["", "expandable_segments:True"])
    assert [row["fits"] for row in simulated.settings] == [True, True]
    assert simulated.settings[0]["devices"][0]["peak_reserved_bytes"] == planned.peak("reserved")
    (tmp_path / "states.json").write_text(json.dumps(STATES))
    with pytest.raises(vramledger.ReadError, match="the tape of `states` is not at hand"):
        vramledger.simulate(tmp_path / "states.json")


def test_evidence_is_what_it_is(tmp_path: Path) -> None:
    message = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "79.11 GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. "
        "Of the allocated memory 76.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but "
        "unallocated.\n"
    )
    (tmp_path / "oom.txt").write_text(message)
    read = vramledger.read(tmp_path / "oom.txt", parameters=7_000_000_000)
    assert isinstance(read, vramledger.Instants)
    assert read.instants[0]["requested_bytes"] == 2 << 30


def test_ranks_are_read_side_by_side(tmp_path: Path) -> None:
    for rank, batch in enumerate((8, 8, 16)):
        vramledger.plan(MLP, batch=batch).save(tmp_path / f"rank{rank}.vlt")
    paths = [tmp_path / f"rank{rank}.vlt" for rank in range(3)]
    ranks = vramledger.read_ranks(paths)
    assert isinstance(ranks, vramledger.RankReadings) and "rank2" in str(ranks)
    with pytest.raises(vramledger.Error):
        vramledger.read_ranks([])


def test_a_log_is_evidence_too(tmp_path: Path) -> None:
    rows = [{"step": step, "allocated_bytes": (100 + step) << 20, "reserved_bytes": 200 << 20} for step in range(8)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = vramledger.reconcile(vramledger.plan(MLP, batch=32), tmp_path / "log.jsonl")
    assert isinstance(held, vramledger.Reconciliation) and held.estimate_difference_bytes is not None
    with pytest.raises(vramledger.ReadError, match="failed to read"):
        vramledger.reconcile(vramledger.plan(MLP), tmp_path / "missing.txt")


def test_rows_go_to_pandas_polars_and_arrow() -> None:
    planned = vramledger.plan(MLP, batch=32)
    rows = len(planned.phases)
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table(planned)
    assert table.num_rows == rows and str(table.schema.field("peak_allocated_bytes").type) == "int64"
    assert table["peak_requested_bytes"].to_pylist() == [row["peak"]["requested_bytes"] for row in planned.phases]
    polars = pytest.importorskip("polars")
    assert polars.DataFrame(planned).height == rows
    pandas = pytest.importorskip("pandas")
    assert len(pandas.DataFrame.from_arrow(planned)) == rows
    # A capsule that nobody reads lets go of what it has.
    planned.__arrow_c_stream__()


def test_a_notebook_sees_html() -> None:
    html = vramledger.plan(MLP)._repr_html_()
    assert html.startswith("<div") and "<table>" in html and "\x1b" not in html


def test_the_interpreter_runs_on_meanwhile() -> None:
    answers: list[Ledger] = []
    thread = threading.Thread(target=lambda: answers.append(vramledger.plan("llama-3-8b", steps=20)))
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
    assert turns > 1000 and answers[0].phases


def test_torch_is_not_needed_to_import() -> None:
    script = "import sys; sys.modules['torch'] = None; import vramledger; vramledger.plan('mlp:2x8')"
    subprocess.run([sys.executable, "-c", script], check=True)
    script = "import sys, vramledger; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_command_has_its_exit_codes() -> None:
    assert command("plan", "mlp:64x8192", "--capacity", "1GiB").returncode == 1
    wrong = command("plan", "nothing")
    assert (wrong.returncode, wrong.stdout) == (2, "") and wrong.stderr.startswith("error: ")
    assert command("--version").stdout == f"vramledger {vramledger.__version__}\n"
