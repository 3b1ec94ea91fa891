"""What the questions answer with: documents of fixed form, all figures in bytes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from vramledger import _native


@dataclass(frozen=True)
class Object:
    """A storage of a tape at one instant."""

    name: str
    """What kind of object it is, the same for every layer: ``model.layers.*.mlp.act_fn.silu``."""
    owner: str | None
    """The module that owns it: ``model.layers.7.mlp``."""
    category: str
    """parameter, gradient, optimizer_state, activation, temporary, …"""
    saved: bool
    """Whether autograd keeps it for the backward pass."""
    dtype: str | None
    """``fp32``, ``bf16``, …, where known."""
    shape: tuple[int, ...] | None
    """The extent of each dimension, where known."""
    bytes: int
    """Its size in the unit of the tape: bytes asked for, or of blocks."""
    device: str
    """The name of the device that it is on."""


class Document:
    """An answer.

    ``str`` gives the page of the terminal, a notebook shows it as HTML, and ``pandas.DataFrame``'s
    ``from_arrow``, ``polars.DataFrame`` and ``pyarrow.table`` take its rows (it has ``__arrow_c_stream__``).
    """

    def __init__(self, native: _native.Document) -> None:
        self._native = native
        self._data: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """What it is called in comparisons."""
        return self._native.name

    def to_dict(self) -> dict[str, Any]:
        """The versioned document as Python's own types; unknown is ``None``. A copy: change it as you like."""
        return cast("dict[str, Any]", json.loads(self.to_json()))

    def to_json(self) -> str:
        """The versioned document (schemas: ``docs/schema``)."""
        return self._native.json()

    def to_csv(self) -> str:
        """The rows, with a heading."""
        return self._native.csv()

    def to_markdown(self) -> str:
        """The page as markdown."""
        return self._native.markdown()

    def __str__(self) -> str:
        return self._native.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._native.html()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """The rows as an Arrow stream, for whatever speaks the Arrow PyCapsule interface."""
        return self._native.__arrow_c_stream__(requested_schema)

    def _get(self, key: str) -> Any:
        if self._data is None:
            self._data = self.to_dict()
        return self._data[key]


class Ledger(Document):
    """The books of a run: phases, peaks and who makes them."""

    @property
    def provenance(self) -> str:
        """estimated (from a config), emulated, measured or constructed."""
        return cast(str, self._get("provenance"))

    @property
    def fits(self) -> bool | None:
        """Whether the run fits on its devices; ``None`` where the ledger does not know."""
        return cast("bool | None", self._get("fits"))

    @property
    def headroom_bytes(self) -> int | None:
        """What the reserved peak leaves of the device; negative where it does not fit."""
        return cast("int | None", self._get("headroom_bytes"))

    @property
    def phases(self) -> list[dict[str, Any]]:
        """A row for each phase: step, micro_batch, phase, peak and end."""
        return cast("list[dict[str, Any]]", self._get("phases"))

    @property
    def warnings(self) -> list[str]:
        """What could not be read or made sense of, a sentence each."""
        return cast("list[str]", self._get("warnings"))

    def peak(self, measure: str = "allocated") -> int | None:
        """The largest total of ``requested``, ``allocated`` or ``reserved`` bytes; ``None`` where not known."""
        peak = self._get("peaks")[measure]
        return None if peak is None else cast(int, peak["bytes"])

    @property
    def peak_phase(self) -> str | None:
        """The phase of the allocated peak, else of the requested one."""
        peaks = self._get("peaks")
        peak = peaks["allocated"] or peaks["requested"]
        return None if peak is None else cast(str, peak["phase"])

    def by_category(self, measure: str = "requested") -> dict[str, int]:
        """Bytes of each category at the peak of ``measure``; empty where that is not known."""
        peak = self._get("peaks")[measure]
        return {} if peak is None else cast("dict[str, int]", peak["by_category"])

    def objects(self, phase: str = "forward", *, step: int = 1, micro_batch: int | None = None) -> list[Object]:
        """The objects that the program holds at the end of a phase, in the order in which they were made.

        Raises ``ReadError`` where no tape is at hand, ``SetupError`` where it has no such phase.
        """
        rows = self._native.objects(step, micro_batch, phase)
        return [Object(*row[:5], None if row[5] is None else tuple(row[5]), *row[6:]) for row in rows]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the tape to ``path`` (``run.vlt``), or the JSON document where ``path`` ends in ``.json``."""
        path = Path(path)
        if path.suffix == ".json":
            path.write_text(self.to_json(), encoding="utf-8")
        else:
            path.write_bytes(self._native.tape_file())


class Comparison(Document):
    """Ledgers against a baseline, each at its own peak."""

    @property
    def candidates(self) -> list[dict[str, Any]]:
        """A row for each candidate: name, peak, saving_bytes (signed), saving_by_category."""
        return cast("list[dict[str, Any]]", self._get("candidates"))


class Reconciliation(Document):
    """A prediction beside evidence."""

    @property
    def signals(self) -> list[str]:
        """What to look at, in the words of the document."""
        return cast("list[str]", self._get("signals"))

    @property
    def estimate_difference_bytes(self) -> int | None:
        """Found less predicted, signed."""
        return cast("int | None", self._get("estimate_difference_bytes"))


class Simulation(Document):
    """One tape under several settings of the allocator."""

    @property
    def settings(self) -> list[dict[str, Any]]:
        """A row for each of the settings: alloc_conf, fits, devices with their peaks."""
        return cast("list[dict[str, Any]]", self._get("settings"))


class Instants(Document):
    """Moments: out-of-memory messages, accounts of the allocator, cards."""

    @property
    def instants(self) -> list[dict[str, Any]]:
        """A row for each moment: the ladder of measures, the verdict and its explanation."""
        return cast("list[dict[str, Any]]", self._get("instants"))


class Series(Document):
    """Totals over the steps of a run."""

    @property
    def verdict(self) -> str | None:
        """steady, warm_up, live_growth, stranding, bounded or too_few_steps."""
        return cast("str | None", self._get("verdict"))


class RankReadings(Document):
    """The ranks of a job side by side."""


_CLASSES: dict[str, type[Document]] = {
    "ledger": Ledger,
    "comparison": Comparison,
    "reconciliation": Reconciliation,
    "simulation": Simulation,
    "instants": Instants,
    "series": Series,
    "ranks": RankReadings,
}


def wrap(native: _native.Document) -> Document:
    """The typed document around a native one."""
    return _CLASSES[native.kind](native)
