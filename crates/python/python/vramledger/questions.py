"""The questions of the command line as functions: plan, read, compare, reconcile, simulate.

They run without the GIL, print nothing, and raise ``vramledger.Error`` where they cannot be answered.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, cast

from vramledger import _native
from vramledger.documents import (
    Comparison,
    Document,
    Instants,
    Ledger,
    RankReadings,
    Reconciliation,
    Series,
    Simulation,
    wrap,
)
from vramledger.errors import ReadError
from vramledger.settings import Settings, pairs

if TYPE_CHECKING:
    from typing_extensions import Unpack

Source = Union[Ledger, str, "os.PathLike[str]", Sequence[Mapping[str, Any]], Mapping[str, Any]]
"""A ledger, a file that has one, hand-written states (a list), or a document (a mapping)."""


def plan(model: str | os.PathLike[str], **settings: Unpack[Settings]) -> Ledger:
    """Predicts a training step from a config, with no framework and no GPU.

    ``model`` is a preset (``"llama-3-8b"``), a ``config.json``, a directory that has one, or ``"mlp:LAYERSxWIDTH"``.
    Raises ``SetupError`` for a model or settings that cannot be.
    """
    return cast(Ledger, wrap(_native.plan(os.fspath(model), pairs(dict(settings)))))


def read(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    by: str = "stack",
    depth: int = 2,
    at: int | None = None,
    step: int | None = None,
    device: int | None = None,
    what_if: Sequence[str] = (),
    capacity: int | None = None,
    model: str | None = None,
    settings: Settings | None = None,
    parameters: int | None = None,
    world_size: int = 1,
) -> Ledger | Instants | Series:
    """What a file that a run left behind says: its form is recognised.

    A snapshot, a trace, a timeline, a document or a ``.vlt`` is a ``Ledger``; out-of-memory messages and accounts are
    ``Instants``; step logs a ``Series``. ``by`` (stack, line, module, size, category) and ``depth`` tell the objects
    at the peak apart; ``at`` looks after an event, ``step`` at the peak of a step, ``device`` at one GPU; ``what_if``
    replays the requests under other settings; ``capacity`` is the bytes of the device that growth is held against.
    ``model`` with ``settings``, or ``parameters`` with ``world_size``, name what an out-of-memory message asked for.
    Raises ``ReadError``, or ``SetupError`` for a question that cannot be.
    """
    path = os.fspath(path)
    known = None if model is None else (model, pairs(dict(settings or {})))
    counted = None if parameters is None else (parameters, world_size)
    called = Path(path).stem if name is None else name
    native = _native.read(called, path, by, depth, at, step, device, list(what_if), capacity, known, counted)
    return cast("Ledger | Instants | Series", wrap(native))


def read_ranks(
    paths: Sequence[str | os.PathLike[str]] | Mapping[str, str | os.PathLike[str]],
    *,
    device: int | None = None,
) -> RankReadings:
    """What the files of the ranks of a job say side by side: stages, and outliers with the objects that make them so.

    ``paths`` are files, called by their stems, or files by name. A file that cannot be read is a row that says why.
    Raises ``ReadError`` where none can be read.
    """
    if isinstance(paths, Mapping):
        files = [(name, os.fspath(path)) for name, path in paths.items()]
    else:
        files = [(Path(path).stem, os.fspath(path)) for path in paths]
    return cast(RankReadings, wrap(_native.read_ranks("ranks", files, device)))


def _ledger(source: Source, name: str | None = None) -> Ledger:
    """The ledger that ``source`` is or has."""
    if isinstance(source, Ledger):
        return source
    if isinstance(source, (str, os.PathLike)):
        answer: Document = read(source)
        if not isinstance(answer, Ledger):
            raise ReadError(f"`{os.fspath(source)}` tells of no objects: it has totals alone")
        return answer
    return cast(Ledger, wrap(_native.ledger(name or "states", json.dumps(source))))


def compare(base: Source, *others: Source, **named: Source) -> Comparison:
    """Ledgers side by side, each at its own peak: ``compare(base, plan(...), checkpoint="ckpt.vlt")``.

    Savings are signed bytes against ``base``. Raises ``ComparisonError`` for an empty or doubled name, no candidate,
    or ledgers without a measure in common.
    """
    baseline = _ledger(base, "base")
    ledgers = [_ledger(other, f"other {place}") for place, other in enumerate(others, 1)]
    rows = [(ledger.name, ledger._native) for ledger in ledgers]
    rows += [(name, _ledger(other, name)._native) for name, other in named.items()]
    return cast(Comparison, wrap(_native.compare((baseline.name, baseline._native), rows)))


def reconcile(
    predicted: Source,
    evidence: Source | None = None,
    *,
    allocated: int | None = None,
    reserved: int | None = None,
    capacity: int | None = None,
    at: str | None = None,
) -> Reconciliation:
    """A prediction beside what a run left behind, line by line with a reason for each difference.

    A file may be any evidence: a recording, an out-of-memory message, a step log. In place of ``evidence``:
    ``allocated``, ``reserved`` and ``capacity`` bytes of one instant, in the phase ``at`` (else that of the predicted
    peak). Raises ``ComparisonError`` or ``ReadError``, and ``TypeError`` where neither is given.
    """
    if evidence is not None:
        native = _native.reconcile_evidence(_side(predicted, "predicted"), _side(evidence, "evidence"))
    elif allocated is None or reserved is None or capacity is None:
        raise TypeError("reconcile() needs evidence, or allocated, reserved and capacity")
    else:
        ours = _ledger(predicted, "predicted")
        native = _native.reconcile(ours.name, ours._native, (allocated, reserved, capacity), at)
    return cast(Reconciliation, wrap(native))


def _side(source: Source, name: str) -> tuple[str, bytes]:
    """What to call ``source``, and its bytes as a file."""
    if isinstance(source, Ledger):
        return source.name, source.to_json().encode()
    if isinstance(source, (str, os.PathLike)):
        try:
            return os.fspath(source), Path(source).read_bytes()
        except OSError as error:
            raise ReadError(f"failed to read `{os.fspath(source)}`: {error.strerror}") from error
    return name, json.dumps(source).encode()


def simulate(
    tape: Ledger | str | os.PathLike[str],
    *,
    alloc_conf: str | Sequence[str] = ("", "expandable_segments:True"),
    gpu: str | None = None,
    capacity: int | None = None,
    context: int | None = None,
    torch: str | None = None,
) -> Simulation:
    """One tape under several settings of the allocator (as in ``PYTORCH_CUDA_ALLOC_CONF``), a row for each.

    ``tape`` is a ledger of ``plan`` or ``capture``, or a ``.vlt``. ``capacity`` and ``context`` are bytes. Raises
    ``ReadError`` where there is no tape, ``SetupError`` for settings that PyTorch refuses.
    """
    ledger = _ledger(tape)
    confs = [alloc_conf] if isinstance(alloc_conf, str) else list(alloc_conf)
    native = _native.simulate(ledger.name, ledger._native, confs, gpu, capacity, context, torch)
    return cast(Simulation, wrap(native))
