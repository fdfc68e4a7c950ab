"""``tq top``: where samples are and who waits for what, drawn from the controller's picture."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from transfer_queue.cli.link import Link
from transfer_queue.cli.output import Output, human_bytes, make_table, show
from transfer_queue.errors import ConnectionLostError, WaitTimeoutError

__all__ = ["draw_picture", "rates", "watch"]


def watch(link: Link, output: Output, *, once: bool, interval_s: float) -> None:
    """Show the picture once, or again and again until interrupted. Raises ConnectionLostError at the first one."""
    now = link.look()
    if once or output is not Output.table:
        show(now, output, lambda: draw_picture(now, None))
        return
    with Live(Group(*draw_picture(now, None)), console=Console(), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval_s)
            before = now
            try:
                now = link.look()
            except (ConnectionLostError, WaitTimeoutError) as error:
                live.update(Group(*draw_picture(before, None), Text(f"{error}; trying again", "red")), refresh=True)
                continue
            live.update(Group(*draw_picture(now, rates(before, now))), refresh=True)


def rates(before: dict[str, Any], now: dict[str, Any]) -> dict[str, float] | None:
    """Each counter's growth a second between two pictures; None if the controller started anew between them."""
    seconds = now["uptime_s"] - before["uptime_s"]
    if before["run"] != now["run"] or seconds <= 0:
        return None
    return {name: (value - before["counters"][name]) / seconds for name, value in now["counters"].items()}


def draw_picture(picture: dict[str, Any], speed: dict[str, float] | None) -> Sequence[Any]:
    """The picture as tables."""
    parts: list[Any] = [Text(_headline(picture, speed), "bold"), Text("")]
    partitions = picture["partitions"]
    fields = list(dict.fromkeys(name for item in partitions for name in item["fields"]))
    rows = [
        [item["name"], item["rows"], human_bytes(item["bytes"])]
        + [_share(item, name) for name in fields]
        + ([f"{item['lost']} lost"] if item["lost"] else [""])
        for item in partitions
    ]
    parts.append(make_table(["PARTITION", "ROWS", "BYTES", *fields, ""], rows) if rows else Text("no rows yet"))
    tasks = [
        [item["name"], each["task"], ", ".join(each["fields"]), each["consumed"], each["ready"], each["waiting"]]
        for item in partitions
        for each in item["subscriptions"]
    ]
    if tasks:
        parts += ["", make_table(["PARTITION", "TASK", "FIELDS", "CONSUMED", "READY", "WAITING"], tasks)]
    waiters = [
        [each["task"] or "a put", each["partition"], each["rows"], f"{each['waited_s']:.0f} s", each["lacks"]]
        for each in picture["waiters"]
    ]
    if waiters:
        parts += ["", make_table(["WAITS", "PARTITION", "ROWS", "FOR", "WHAT IS THERE AND WHAT LACKS"], waiters)]
    units = [
        [each["name"], each["address"] or "-", _use(each), each["blocks"], "" if each["connected"] else "away"]
        for each in picture["units"]
    ]
    parts += ["", make_table(["UNIT", "ADDRESS", "USE", "BLOCKS", ""], units) if units else Text("no storage units")]
    return parts


def _headline(picture: dict[str, Any], speed: dict[str, float] | None) -> str:
    most = picture["sample_capacity"]
    parts = [
        f"{picture['queue']} ({picture['backend']})",
        f"{picture['rows']} rows" + ("" if most is None else f" of {most}"),
        f"{picture['clients']} clients",
    ]
    if speed is not None:
        parts.append(f"in {speed['rows_put']:.0f} rows/s, {human_bytes(speed['bytes_put'])}/s")
        parts.append(f"out {speed['rows_fetched']:.0f} rows/s")
    return "   ".join(parts)


def _share(partition: dict[str, Any], field: str) -> str:
    ready = partition["fields"].get(field)
    if ready is None:
        return "-"
    return "all" if ready == partition["rows"] else f"{ready}/{partition['rows']}"


def _use(unit: dict[str, Any]) -> str:
    share = unit["used"] / unit["capacity"] if unit["capacity"] else 0.0
    return f"{human_bytes(unit['used'])} of {human_bytes(unit['capacity'])} ({share:.0%})"
