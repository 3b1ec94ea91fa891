"""Whether this PyTorch does what the ledgers say it does: a controlled step on the CPU under ``torch.profiler``."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vramledger import _native
from vramledger.documents import Ledger
from vramledger.optimizers import optimizer_state
from vramledger.questions import _ledger, plan
from vramledger.saved import saved_tensors
from vramledger.tables import Table, rows_of

LAYERS, WIDTH, BATCH = 4, 128, 32
PACKAGES = ("torch", "numpy", "transformers", "peft", "accelerate")


@dataclass(frozen=True)
class Check:
    """One thing that PyTorch and the ledgers say."""

    name: str
    passed: bool
    expected: str
    """What the ledger says."""
    found: str
    """What PyTorch does."""


@dataclass(frozen=True)
class FrameworkCheck(Table):
    """Whether all checks passed. True where they did."""

    rows: tuple[Check, ...]
    versions: dict[str, str]
    """The releases that were checked, of ``vramledger`` itself too."""

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(row.passed for row in self.rows)

    def __bool__(self) -> bool:
        return self.passed

    def to_dict(self) -> dict[str, Any]:
        """The checks, the versions, and whether all passed."""
        checks = {row.name: row.passed for row in self.rows}
        return {
            "status": "passed" if self.passed else "failed",
            "check_kind": "framework_conformance",
            "versions": self.versions,
            "checks": checks,
            "rows": self._table(),
        }

    def _head(self) -> str:
        failed = [row.name for row in self.rows if not row.passed]
        verdict = f"does not do what the ledgers say: {', '.join(failed)}" if failed else "does what the ledgers say"
        return f"torch {self.versions['torch']} {verdict}"

    def _table(self) -> list[dict[str, Any]]:
        return rows_of(self.rows)


def check_framework() -> FrameworkCheck:
    """Runs one step of a small network on the CPU and holds what the profiler saw against the ledgers.

    That phases are recorded in their order; that memory activity is reported, and at least what the tensors have; that
    states on the CPU are in no total of a GPU; that the gradient is there and finite; that autograd keeps, the
    optimizer holds and the FLOP counter counts what ``plan`` says of the same network. A failed check raises nothing.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function
    from torch.utils.flop_counter import FlopCounterMode

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.ReLU())]
        model = torch.nn.Sequential(*layers)
        x = torch.randn(BATCH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    before = optimizer_state(optimizer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as seen:
        with record_function("vramledger.forward"):
            kept = saved_tensors(lambda: model(x).sum(), model)
        with record_function("vramledger.backward"):
            kept.result.backward()
        with record_function("vramledger.update"):
            optimizer.step()
    state = optimizer_state(optimizer)
    gradients = [parameter.grad for parameter in model.parameters()]
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    events = list(seen.events())
    planned = plan(f"mlp:{LAYERS}x{WIDTH}", batch=BATCH, loss="sum", optimizer="adamw")
    saved = [object.bytes for object in planned.objects("forward") if object.saved]
    held = [object.bytes for object in planned.objects("update") if object.category == "optimizer_state"]
    flops = planned.to_dict()["flops"]
    rows = [
        _phases(events),
        _activity(events, kept.activation_bytes),
        _host_states(kept.activation_bytes),
        Check(
            "backward_gradient_present",
            all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients),
            f"{LAYERS} finite gradients",
            f"{sum(gradient is not None for gradient in gradients)} gradients",
        ),
        _same("saved_activations", sum(saved), kept.activation_bytes, "bytes"),
        _same("optimizer_state_before_the_first_step", 0, before.bytes, "bytes"),
        # Counters are 4 bytes a parameter, on the device or on the host.
        _same(
            "optimizer_state_after_the_first_step",
            2 * LAYERS * WIDTH * WIDTH * 4,
            sum(bytes for key, bytes in state.by_key().items() if key != "step"),
            "bytes",
        ),
        _same("planned_optimizer_state", sum(b for b in held if b > 4), state.bytes - 4 * LAYERS, "bytes"),
        _same("flops_of_a_step", flops["forward"] + flops["backward"], counter.get_total_flops(), "FLOPs"),
    ]
    return FrameworkCheck(tuple(rows), _versions())


def _same(name: str, expected: int, found: int, unit: str) -> Check:
    return Check(name, expected == found, f"{expected:,} {unit}", f"{found:,} {unit}")


def _phases(events: list[Any]) -> Check:
    """The phases that the profiler recorded, in the order in which they began."""
    wanted = [f"vramledger.{phase}" for phase in ("forward", "backward", "update")]
    starts = {event.name: event.time_range.start for event in events if event.name in wanted}
    found = sorted(starts, key=lambda name: float(starts[name]))
    return Check("phase_ranges_present_and_ordered", found == wanted, ", ".join(wanted), ", ".join(found))


def _activity(events: list[Any], bytes: int) -> Check:
    """What the profiler saw being allocated on the CPU is at least what was kept, but for the input made before."""
    seen = sum(max(int(event.self_cpu_memory_usage), 0) for event in events)
    made = bytes - BATCH * WIDTH * 4
    return Check("cpu_memory_activity_reported", seen >= made > 0, f"at least {made:,} bytes", f"{seen:,} bytes")


def _host_states(bytes: int) -> Check:
    """A state on the CPU counts in no phase of a GPU."""
    states = [
        {
            "name": "activations on the host",
            "category": "activation",
            "size_mb": bytes / 2**20,
            "start_phase": "forward",
            "end_phase": "backward",
            "device": "cpu",
            "persistent": False,
        }
    ]
    ledger: Ledger = _ledger(states)
    devices = ledger.to_dict()["devices"]
    on_gpus = [
        row["peak"]["allocated_bytes"] or 0 for row in ledger.phases if devices[row["device"]]["kind"] == "gpu"
    ]
    return Check("cpu_state_excluded_from_gpu_ledger", not any(on_gpus), "0 bytes", f"{sum(on_gpus):,} bytes")


def _versions() -> dict[str, str]:
    found = {"vramledger": _native.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
