"""The books of GPU training memory: what is on the device, when and why.

Predict (``plan``), read what a run left behind (``read``), and hold one against the other (``compare``, ``reconcile``,
``simulate``). Importing this needs no PyTorch. All amounts are bytes.
"""

from __future__ import annotations

from vramledger._native import __version__
from vramledger.documents import (
    Comparison,
    Document,
    Instants,
    Ledger,
    Object,
    Reconciliation,
    Series,
    Simulation,
)
from vramledger.errors import ComparisonError, Error, MeasureError, ReadError, SetupError
from vramledger.questions import compare, plan, read, reconcile, simulate
from vramledger.settings import Settings

__all__ = [
    "Comparison",
    "ComparisonError",
    "Document",
    "Error",
    "Instants",
    "Ledger",
    "MeasureError",
    "Object",
    "ReadError",
    "Reconciliation",
    "Series",
    "Settings",
    "SetupError",
    "Simulation",
    "__version__",
    "compare",
    "plan",
    "read",
    "reconcile",
    "simulate",
]
