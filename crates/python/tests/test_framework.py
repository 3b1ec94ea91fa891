"""The controlled step under the profiler: what it checks, and that a difference is named."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import vramledger  # noqa: E402
from vramledger import framework  # noqa: E402


def test_this_pytorch_does_what_the_ledgers_say() -> None:
    report = vramledger.check_framework()
    assert report and report.passed, str(report)
    told = report.to_dict()
    assert (told["status"], told["check_kind"]) == ("passed", "framework_conformance")
    assert told["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert {
        "phase_ranges_present_and_ordered",
        "cpu_memory_activity_reported",
        "cpu_state_excluded_from_gpu_ledger",
        "backward_gradient_present",
    } <= set(told["checks"])


def test_a_difference_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(model: str, **settings: Any) -> vramledger.Ledger:
        return vramledger.plan("mlp:5x128", **settings)

    monkeypatch.setattr(framework, "plan", other)
    report = vramledger.check_framework()
    failed = {row.name for row in report.rows if not row.passed}
    assert not report and failed == {"saved_activations", "planned_optimizer_state", "flops_of_a_step"}
    assert "does not do what the ledgers say: saved_activations" in str(report)
