"""The exceptions of this package: one tree, each with a sentence and, where there is one, a hint."""

from __future__ import annotations


class Error(Exception):
    """A question that cannot be answered.

    ``str(error)`` is one sentence: what, where, what to do. ``error.hint`` is what the reader can do besides.
    """

    hint: str | None

    def __init__(self, sentence: str, hint: str | None = None) -> None:
        super().__init__(sentence)
        self.hint = hint

    def __str__(self) -> str:
        sentence = str(self.args[0])
        return f"{sentence} (hint: {self.hint})" if self.hint else sentence


class SetupError(Error, ValueError):
    """A model, a card or settings that cannot be: unknown, out of range, or at odds with each other."""


class ReadError(Error, ValueError):
    """A file that is not there, cannot be read, or is no evidence of a run's memory."""


class ComparisonError(Error, ValueError):
    """Ledgers that cannot be held against each other."""


class MeasureError(Error, RuntimeError):
    """A measurement of a run that cannot be made: of a model, an optimizer or a device that is not as it has to be."""
