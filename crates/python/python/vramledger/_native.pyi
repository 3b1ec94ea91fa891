"""The native module: documents behind the typed classes of ``vramledger.documents``."""

from collections.abc import Sequence
from typing import final

__version__: str

@final
class Document:
    name: str
    kind: str
    def json(self) -> str: ...
    def text(self) -> str: ...
    def markdown(self) -> str: ...
    def html(self) -> str: ...
    def csv(self) -> str: ...
    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...
    def tape_file(self) -> bytes: ...
    def objects(
        self, step: int, micro_batch: int | None, phase: str
    ) -> list[tuple[str, str | None, str, bool, str | None, list[int] | None, int, str]]: ...

@final
class Recorder:
    def __new__(cls, gpu: str | None, capacity: int | None = None, context: int | None = None) -> Recorder: ...
    def alloc(
        self,
        bytes: int,
        host: bool,
        name: str,
        owner: str | None,
        category: str,
        dtype: str | None,
        shape: Sequence[int] | None,
    ) -> int: ...
    def free(self, object: int) -> None: ...
    def relabel(self, object: int, name: str, owner: str | None, category: str, saved: bool) -> None: ...
    def rename(self, object: int, name: str, owner: str | None, category: str, saved: bool) -> None: ...
    def mark(self, step: int, micro_batch: int | None, phase: str) -> None: ...
    def finish(
        self,
        name: str,
        subject: str,
        parameters: tuple[int, int, int] | None,
        assumptions: list[str],
        alloc_conf: str,
    ) -> Document: ...

def main(words: list[str]) -> int: ...
def plan(model: str, settings: list[tuple[str, str]]) -> Document: ...
def setting_keys() -> list[str]: ...
def read(
    name: str,
    path: str,
    by: str,
    depth: int,
    at: int | None,
    step: int | None,
    device: int | None,
    what_if: list[str],
    capacity: int | None,
    known: tuple[str, list[tuple[str, str]]] | None,
    parameters: tuple[int, int] | None,
) -> Document: ...
def ledger(name: str, text: str) -> Document: ...
def recorded(name: str, device: str, capacity: int, snapshot: bytes, notes: str) -> Document: ...
def compare(base: tuple[str, Document], others: list[tuple[str, Document]]) -> Document: ...
def reconcile(
    predicted: tuple[str, Document],
    evidence: tuple[str, Document] | None,
    found: tuple[int, int, int] | None,
    at: str | None,
) -> Document: ...
def simulate(
    name: str,
    document: Document,
    alloc_confs: list[str],
    gpu: str | None,
    capacity: int | None,
    context: int | None,
    torch: str | None,
) -> Document: ...
