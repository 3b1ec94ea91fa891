"""Rows as a table: of a terminal, of a notebook, of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from html import escape
from typing import Any

MOST_ROWS = 40


def rows_of(records: Iterable[Any]) -> list[dict[str, Any]]:
    """The fields of dataclasses."""
    return [asdict(record) for record in records]


def cell(value: Any) -> str:
    """A value as a person reads it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(part) for part in value) if value else ""
    return "" if value is None else str(value)


class Table:
    """A report with a sentence and rows."""

    def _head(self) -> str:
        raise NotImplementedError

    def _table(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The sentence and the rows as Python's own types."""
        return {"summary": self._head(), "rows": self._table()}

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        rows = self._table()
        lines = [self._head()]
        if rows:
            heads = list(rows[0])
            cells = [[cell(row[head]) for head in heads] for row in rows[:MOST_ROWS]]
            widths = [max(len(head), *(len(row[at]) for row in cells)) for at, head in enumerate(heads)]
            right = [any(isinstance(row[head], (int, float)) for row in rows) for head in heads]
            lines.append("")
            for row in [heads, *cells]:
                padded = (
                    text.rjust(width) if number else text.ljust(width)
                    for text, width, number in zip(row, widths, right)
                )
                lines.append("  ".join(padded).rstrip())
            if len(rows) > MOST_ROWS:
                lines.append(f"and {len(rows) - MOST_ROWS} more rows")
        return "\n".join(lines) + "\n"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = self._table()
        html = [f"<p><b>{escape(self._head())}</b></p>"]
        if rows:
            html.append("<table><tr>" + "".join(f"<th>{escape(head)}</th>" for head in rows[0]) + "</tr>")
            for row in rows[:MOST_ROWS]:
                html.append("<tr>" + "".join(f"<td>{escape(cell(value))}</td>" for value in row.values()) + "</tr>")
            html.append("</table>")
        return "\n".join(html)
