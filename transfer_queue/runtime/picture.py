"""The dataflow as people see it: what ``tq top`` and the controller's page draw. Made when asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from transfer_queue.control.commands import Fetch
from transfer_queue.control.queries import count_rows, subscriptions_of
from transfer_queue.control.wait_queue import Waiter
from transfer_queue.runtime.why import find_writers, in_words
from transfer_queue.storage.base import DEVICE

if TYPE_CHECKING:
    from transfer_queue.runtime.controller import Controller

__all__ = ["merged", "partition_pictures", "picture"]

_MOST_WAITERS = 100


def partition_pictures(controller: Controller) -> Iterator[dict[str, Any]]:
    """The partitions of `picture`, one at a time. Partitions that are removed before their turn are left out."""
    core = controller.core
    for name in list(core.state.partitions):
        if (partition := core.state.partitions.get(name)) is not None:
            yield {
                "name": name,
                **count_rows(partition, core.wait_queue.waiting_for(name)),
                "subscriptions": subscriptions_of(partition),
            }


def picture(controller: Controller, partitions: bool = True) -> dict[str, Any]:
    """Plain values: the oldest waiters and what they lack, storage units, counters since the controller's start, and
    last the partitions with their fields and tasks, unless they are not wanted. ``time``: this machine's clock, in
    seconds since 1970. ``shards``: how many controllers there are, each with the next port for its page; 0: one, or
    nobody knows their ports."""
    core = controller.core
    now = controller.now()
    units = [
        {
            "name": unit.info.name,
            "address": unit.info.address,
            "capacity": unit.info.capacity,
            "used": unit.info.used,
            "blocks": unit.blocks,
            "connected": unit.connection is not None,
            "draining": unit.draining,
            "on_device": DEVICE in unit.info.attributes,
        }
        for unit in controller.units
    ]
    counters = controller.counters
    return {
        "queue": controller.config.name,
        "run": controller.run,
        "shard": controller.config.shard,
        "shards": len(controller.config.shards) if controller.config.metrics_port else 0,
        "backend": controller.config.backend.kind,
        "time": time.time(),
        "uptime_s": now - controller.started,
        "rows": core.state.rows,
        "sample_capacity": core.sample_capacity,
        "clients": controller.clients_connected,
        "expected_units": controller.expected_units,
        "waiters": _waiters(controller, now),
        "units": units,
        "counters": {
            "rows_put": counters.rows_put,
            "bytes_put": counters.bytes_put,
            "rows_fetched": counters.rows_fetched,
        },
        "partitions": list(partition_pictures(controller)) if partitions else [],
    }


def merged(pictures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The pictures of all controllers of a queue as one. Every controller has every unit, and every client."""
    units: dict[str, dict[str, Any]] = {}
    for unit in (unit for one in pictures for unit in one["units"]):
        seen = units.setdefault(unit["name"], unit)
        seen["connected"] = seen["connected"] and unit["connected"]
        seen["draining"] = seen["draining"] or unit["draining"]
    capacities = [one["sample_capacity"] for one in pictures]
    waiters = [waiter for one in pictures for waiter in one["waiters"]]
    return {
        **pictures[0],
        "run": " ".join(one["run"] for one in pictures),
        "uptime_s": min(one["uptime_s"] for one in pictures),
        "rows": sum(one["rows"] for one in pictures),
        "sample_capacity": None if None in capacities else sum(capacities),
        "clients": max(one["clients"] for one in pictures),
        "partitions": [partition for one in pictures for partition in one["partitions"]],
        "waiters": sorted(waiters, key=lambda waiter: -waiter["waited_s"])[:_MOST_WAITERS],
        "units": list(units.values()),
        "counters": {name: sum(one["counters"][name] for one in pictures) for name in pictures[0]["counters"]},
    }


def _waiters(controller: Controller, now: float) -> list[dict[str, Any]]:
    oldest = sorted(controller.core.wait_queue, key=lambda waiter: waiter.since)[:_MOST_WAITERS]
    lacks: dict[Any, tuple[str, list[dict[str, Any]]]] = {}  # the same for all of one subscription; looking costs time
    found = []
    for waiter in oldest:
        if waiter.key not in lacks or waiter.key is None:
            lacks[waiter.key] = _lacks(controller, waiter)
        command = waiter.command
        fetch = isinstance(command, Fetch)
        session = controller.clients.get(waiter.client)
        words, writers = lacks[waiter.key]
        found.append(
            {
                "partition": command.partition,
                "task": command.task if isinstance(command, Fetch) else "",
                "fields": list(command.fields) if isinstance(command, Fetch) else [],
                "rows": command.batch_size if isinstance(command, Fetch) else len(command.keys or ()) or command.append,
                "kind": "fetch" if fetch else "put",
                "client": "" if session is None else session.client_id,
                "waited_s": now - waiter.since,
                "lacks": words,
                "writers": writers,
            }
        )
    return found


def _lacks(controller: Controller, waiter: Waiter) -> tuple[str, list[dict[str, Any]]]:
    """What a request waits for, in words, and who writes it: missing fields, or all if none is missing."""
    core = controller.core
    if not isinstance(waiter.command, Fetch):
        return f"waits until rows are cleared: {core.state.rows} of {core.sample_capacity} exist", []
    partition = core.state.partitions.get(waiter.command.partition)
    if partition is None:
        return "the partition does not exist yet", find_writers(controller, dict.fromkeys(waiter.command.fields, 0))
    counts = core.serving.missing(waiter.command, partition)
    missing = {name: rows for name, rows in counts.items() if rows}
    writers = find_writers(controller, missing or counts)
    words = in_words(writers) if missing else []
    return "; ".join([core.serving.shortfall(waiter.command, partition), *words]), writers
