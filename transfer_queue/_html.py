"""Tables for notebooks. Everything is escaped: keys and tags are whatever users put."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

__all__ = ["html_table"]

_MOST_ROWS = 20
_MOST_LETTERS = 120


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], count: int) -> str:
    """``rows``: the first ones of ``count`` are shown, and only those are taken from it."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = [
        "<tr>" + "".join(f"<td>{escape(_short(cell))}</td>" for cell in row) + "</tr>"
        for row in islice(rows, _MOST_ROWS)
    ]
    more = f"<p>and {count - _MOST_ROWS} more rows</p>" if count > _MOST_ROWS else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>" if lines else ""
    return f"<p><strong>{escape(title)}</strong></p>{table}{more}"


def _short(cell: object) -> str:
    text = str(cell)
    return text if len(text) <= _MOST_LETTERS else text[:_MOST_LETTERS] + "…"
