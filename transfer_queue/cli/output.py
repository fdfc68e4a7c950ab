"""Results in the form that was asked for: a table for people, JSON or YAML for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from transfer_queue._printable import printable

__all__ = [
    "WIDE",
    "Output",
    "OutputOption",
    "asked_width",
    "dumped",
    "human_bytes",
    "line",
    "make_table",
    "show",
    "unmarked",
]


WIDE = 300
"""Columns of a file or a pipe, which have no width: lines stay whole."""


class Output(str, Enum):
    """Forms of results."""

    table = "table"
    json = "json"
    yaml = "yaml"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Form of the result.")]


def show(document: Any, output: Output, draw: Callable[[], Sequence[Any]], *, width: int | None = None) -> None:
    """Print ``document`` as JSON or YAML, or what ``draw`` makes of it for people.

    Lines stay whole in a file or a pipe, unless ``width`` limits them.
    """
    if output is Output.json:
        typer.echo(dumped(lambda ascii_only: json.dumps(document, indent=2, default=str, ensure_ascii=ascii_only)))
    elif output is Output.yaml:
        plain = json.loads(json.dumps(document, default=str))
        typer.echo(
            dumped(lambda ascii_only: yaml.safe_dump(plain, sort_keys=False, allow_unicode=not ascii_only)), nl=False
        )
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = width or WIDE
        for part in draw():
            text = isinstance(part, str)
            whole = not width and (text or isinstance(part, Text))
            console.print(line(part) if text else part, soft_wrap=whole)


def asked_width() -> int | None:
    """The columns that ``COLUMNS`` names; None without it."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else None


def dumped(dump: Callable[[bool], str]) -> str:
    """Return ``dump(False)``, with letters of all languages, or ``dump(True)`` if a character is not printable."""
    text = dump(False)
    return text if text.replace("\n", "").isprintable() else dump(True)


def line(text: str, style: str = "") -> Text:
    """One line, without control characters and markup."""
    return Text(printable(text), style)


def unmarked(text: str) -> str:
    """The same for what takes a string with markup."""
    return escape(printable(text))


def make_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> Table:
    """A plain table; numbers stand to the right. Cells are text, never markup."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for position, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[position], int | float) for row in rows)
        table.add_column(printable(column), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(line(str(cell)) for cell in row))
    return table


def human_bytes(count: float) -> str:
    """``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} PiB"
