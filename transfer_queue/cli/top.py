"""``tq top``: where samples are and who waits for what, drawn from the controller's picture."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from transfer_queue._printable import printable
from transfer_queue.cli.connection import ControllerConnection
from transfer_queue.cli.output import WIDE, Output, asked_width, human_bytes, make_table, show
from transfer_queue.errors import ConnectionLostError, WaitTimeoutError

__all__ = ["View", "draw_picture", "rates", "watch"]

_NARROW = 60
"""Width in columns below which a table becomes one paragraph per row."""


def watch(link: ControllerConnection, output: Output, *, once: bool, interval_s: float) -> None:
    """Show the picture once, or until ``q`` is pressed. Without a terminal it is shown once.

    Raises:
        ConnectionLostError: The controller does not answer the first request.
    """
    now = link.look()
    if once or output is not Output.table or not (sys.stdout.isatty() and sys.stdin.isatty()):
        width = Console().width if sys.stdout.isatty() else asked_width()
        show(now, output, lambda: draw_picture(now, None, width=width or WIDE), width=width)
        return
    console = Console(highlight=False)
    view = View()
    speed: dict[str, float] | None = None
    trouble = ""
    due = time.monotonic() + interval_s
    with _keys() as keys, Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(view.frame(console, now, speed, trouble), refresh=True)
            for key in keys(max(0.0, due - time.monotonic())):
                if not view.press(key, console.height):
                    return
            if time.monotonic() < due:
                continue
            before, due = now, time.monotonic() + interval_s
            try:
                now = link.look()
                speed, trouble = rates(before, now), ""
            except (ConnectionLostError, WaitTimeoutError) as error:
                speed, trouble = None, f"{error}; trying again"


class View:
    """State of the view: the scroll offset, and the text that names must contain."""

    def __init__(self) -> None:
        self.offset = 0
        self.filter = ""
        self._typing = False

    def press(self, key: str, height: int) -> bool:
        """Act on a key; False ends the program."""
        if self._typing:
            if key in ("\n", "\r"):
                self._typing = False
            elif key == "esc":
                self._typing, self.filter = False, ""
            elif key in ("\x7f", "\b"):
                self.filter = self.filter[:-1]
            elif len(key) == 1 and key.isprintable():
                self.filter += key
            return True
        if key == "/":
            self._typing, self.filter, self.offset = True, "", 0
        elif key == "esc":
            self.filter = ""
        page = max(1, height - 2)
        moves = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page, " ": page}
        self.offset += moves.get(key, 0)
        if key == "g":
            self.offset = 0
        return key not in ("q", "Q")

    def frame(self, console: Console, picture: dict[str, Any], speed: dict[str, float] | None, trouble: str) -> Text:
        """The part of the picture that fits on the screen, and a line of help."""
        with console.capture() as captured:
            for part in draw_picture(picture, speed, self.filter, console.width):
                console.print(part)
        lines = captured.get().rstrip("\n").split("\n")
        room = max(1, console.height - 1)
        self.offset = max(0, min(self.offset, len(lines) - room))
        frame = Text.from_ansi("\n".join(lines[self.offset : self.offset + room]))
        below = len(lines) - room - self.offset
        more = f"  {below} lines below" if below > 0 else ""
        words = f"filter: {self.filter}" + ("_" if self._typing else "") if self._typing or self.filter else "/ filters"
        foot = Text(printable(trouble), "red") if trouble else Text(f"q quits  {words}  arrows scroll{more}", "dim")
        foot.truncate(console.width)
        return frame.append("\n").append(foot)


_SEQUENCES = {"\x1b[A": "up", "\x1b[B": "down", "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b": "esc"}


@contextmanager
def _keys() -> Iterator[Any]:
    """Yield a function that waits up to a number of seconds for keys of the terminal and returns the pressed keys."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(timeout_s: float) -> list[str]:
        if not select.select([descriptor], [], [], timeout_s)[0]:
            return []
        text = os.read(descriptor, 1024).decode(errors="replace")
        return [_SEQUENCES[text]] if text in _SEQUENCES else [key for key in text if key != "\x1b"] or ["q"]

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def rates(before: dict[str, Any], now: dict[str, Any]) -> dict[str, float] | None:
    """Growth of each counter per second between two pictures; None if the controller restarted between them."""
    seconds = now["uptime_s"] - before["uptime_s"]
    if before["run"] != now["run"] or seconds <= 0:
        return None
    return {name: (value - before["counters"][name]) / seconds for name, value in now["counters"].items()}


def draw_picture(
    picture: dict[str, Any], speed: dict[str, float] | None, only: str = "", width: int = WIDE
) -> Sequence[Any]:
    """The picture as tables: waiting requests, then partitions, the newest first, their tasks, and storage units.

    Args:
        picture: See ``transfer_queue.runtime.picture``.
        speed: See :func:`rates`.
        only: Partitions, tasks and units whose names contain this text.
        width: Columns of the terminal.
    """

    def table(columns: list[str], rows: list[list[Any]]) -> Any:
        return make_table(columns, rows) if width >= _NARROW else _paragraphs(columns, rows)

    def wanted(*names: str) -> bool:
        return any(only in name for name in names)

    parts: list[Any] = [Text(_headline(picture, speed), "bold"), ""]
    partitions = [item for item in reversed(picture["partitions"]) if wanted(item["name"])]
    waiters = [
        [each["task"] or "a put", each["partition"], each["rows"], f"{each['waited_s']:.0f} s", each["lacks"]]
        for each in picture["waiters"]
        if wanted(each["task"], each["partition"])
    ]
    if waiters:
        parts += [table(["WAITS", "PARTITION", "ROWS", "FOR", "WHAT IS THERE AND WHAT LACKS"], waiters), ""]
    fields = list(dict.fromkeys(name for item in partitions for name in item["fields"]))
    rows = [
        [item["name"], item["rows"], human_bytes(item["bytes"])]
        + [_share(item, name) for name in fields]
        + [f"{item['lost']} lost" if item["lost"] else ""]
        for item in partitions
    ]
    none = f"no partition with {only!r} in its name" if only and picture["partitions"] else "no rows yet"
    parts.append(table(["PARTITION", "ROWS", "BYTES", *fields, ""], rows) if rows else none)
    tasks = [
        [item["name"], each["task"], ", ".join(each["fields"]), each["consumed"], each["ready"], each["waiting"]]
        for item in reversed(picture["partitions"])
        for each in item["subscriptions"]
        if wanted(item["name"], each["task"])
    ]
    if tasks:
        parts += ["", table(["PARTITION", "TASK", "FIELDS", "CONSUMED", "READY", "WAITING"], tasks)]
    units = [
        [each["name"], each["address"] or "-", _use(each), each["blocks"], _state(each)]
        for each in picture["units"]
        if wanted(each["name"])
    ]
    if units or not only:
        parts += ["", table(["UNIT", "ADDRESS", "USE", "BLOCKS", ""], units) if units else "no storage units"]
    return parts


def _paragraphs(columns: list[str], rows: list[list[Any]]) -> Text:
    """A table for narrow terminals: a line with the name of each row, and its other cells below."""
    found = Text()
    for name, *cells in rows:
        about = ", ".join(
            f"{column.lower()} {cell}".strip() for column, cell in zip(columns[1:], cells, strict=True) if cell != ""
        )
        found.append(f"{printable(str(name))}\n", "bold").append(f"  {printable(about)}\n")
    found.rstrip()
    return found


def _headline(picture: dict[str, Any], speed: dict[str, float] | None) -> str:
    most = picture["sample_capacity"]
    parts = [
        f"{printable(picture['queue'])} ({picture['backend']})",
        f"{picture['rows']} rows" + ("" if most is None else f" of {most}"),
        f"{picture['clients']} client{'' if picture['clients'] == 1 else 's'}",
    ]
    if speed is not None:
        parts.append(f"in {speed['rows_put']:.0f} rows/s, {human_bytes(speed['bytes_put'])}/s")
        parts.append(f"out {speed['rows_fetched']:.0f} rows/s")
    return "   ".join(parts)


def _state(unit: dict[str, Any]) -> str:
    if not unit["connected"]:
        return "away"
    return "draining" if unit["draining"] and unit["blocks"] else "drained" if unit["draining"] else ""


def _share(partition: dict[str, Any], field: str) -> str:
    ready = partition["fields"].get(field)
    if ready is None:
        return "-"
    return "all" if ready == partition["rows"] else f"{ready}/{partition['rows']}"


def _use(unit: dict[str, Any]) -> str:
    share = unit["used"] / unit["capacity"] if unit["capacity"] else 0.0
    return f"{human_bytes(unit['used'])} of {human_bytes(unit['capacity'])} ({share:.0%})"
