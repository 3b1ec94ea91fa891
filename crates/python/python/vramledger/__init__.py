"""The books of GPU training memory: what is on the device, when and why.

Predict (``plan``), read what a run left behind (``read``), and hold one against the other (``compare``, ``reconcile``,
``simulate``). In a program with PyTorch: measure (``saved_tensors``, ``optimizer_state``), capture a step without a GPU
(``capture``), follow a live run (``track``, ``phase``, ``record``, ``watch``), and verify that gradients stay the same
where memory is saved (``verify_accumulation``, ``verify_checkpointing``, ``verify_offload``). ``check_framework``
holds this PyTorch against what the ledgers say. Importing this needs no PyTorch. All amounts are bytes.
"""

from __future__ import annotations

from vramledger._native import __version__
from vramledger.capturing import capture
from vramledger.documents import (
    Comparison,
    Document,
    Instants,
    Ledger,
    Object,
    RankReadings,
    Reconciliation,
    Series,
    Simulation,
)
from vramledger.errors import ComparisonError, Error, MeasureError, ReadError, SetupError
from vramledger.framework import Check, FrameworkCheck, check_framework
from vramledger.optimizers import OptimizerState, StateTensor, optimizer_state
from vramledger.questions import compare, plan, read, read_ranks, reconcile, simulate
from vramledger.recording import Recording, record
from vramledger.saved import Saved, SavedTensors, saved_tensors
from vramledger.settings import Settings
from vramledger.tracking import PhaseMark, Track, phase, track
from vramledger.verify import (
    GradientDifference,
    Verification,
    verify_accumulation,
    verify_checkpointing,
    verify_offload,
)
from vramledger.watching import GrowthWarning, Watch, Window, watch

__all__ = [
    "Check",
    "Comparison",
    "ComparisonError",
    "Document",
    "Error",
    "FrameworkCheck",
    "GradientDifference",
    "GrowthWarning",
    "Instants",
    "Ledger",
    "MeasureError",
    "Object",
    "OptimizerState",
    "PhaseMark",
    "RankReadings",
    "ReadError",
    "Reconciliation",
    "Recording",
    "Saved",
    "SavedTensors",
    "Series",
    "Settings",
    "SetupError",
    "Simulation",
    "StateTensor",
    "Track",
    "Verification",
    "Watch",
    "Window",
    "__version__",
    "capture",
    "check_framework",
    "compare",
    "optimizer_state",
    "phase",
    "plan",
    "read",
    "read_ranks",
    "reconcile",
    "record",
    "saved_tensors",
    "simulate",
    "track",
    "verify_accumulation",
    "verify_checkpointing",
    "verify_offload",
    "watch",
]
