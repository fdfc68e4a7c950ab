"""Why requests wait, in words: for ``tq why``, the page, and the error of a fetch whose time is up.

A request that waits for fields is traced back: the task that wrote a missing field last may wait itself, for a field
that another task writes. Where this ends is the stage that holds up the others. One client may serve several tasks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from transfer_queue.control.commands import Command, Fetch
from transfer_queue.control.puts import did_you_mean, join_names
from transfer_queue.errors import TransferQueueError, WaitTimeoutError

if TYPE_CHECKING:
    from transfer_queue.runtime.controller import Controller

__all__ = ["explain", "explain_timeout", "find_writers", "in_words"]


def find_writers(controller: Controller, missing: Mapping[str, int]) -> list[dict[str, Any]]:
    """For each field: on how many rows it is missing, the client that wrote it last (None: nobody has since this
    controller started), the task for which this client had taken rows, where and how many seconds ago it wrote,
    whether it is connected, how many clients have written the field and are connected, and how many rows a second all
    of them write (0.0: too few puts tell).

    Args:
        controller: Whose clients they are.
        missing: Field -> the number of rows that lack it.
    """
    connected = _connected(controller)
    found: list[dict[str, Any]] = []
    now = time.monotonic()
    for field, rows in missing.items():
        writes = controller.last_writes.all_of(field)
        last = writes[-1] if writes else None
        found.append(
            {
                "field": field,
                "rows": rows,
                "client": last.client if last else None,
                "task": controller.last_writes.task_of(last.client) or last.task if last else "",
                "partition": last.partition if last else "",
                "ago_s": max(0.0, now - last.at) if last else 0.0,
                "connected": last is not None and last.client in connected,
                "rows_s": sum(write.pace(now) for write in writes),
                "clients": len(writes),
                "clients_connected": sum(write.client in connected for write in writes),
            }
        )
    return found


def _connected(controller: Controller) -> frozenset[str]:
    """Names of the connected clients, made once for all requests that end at the same moment."""
    now, known = controller.now(), controller.last_writes
    if now - known.connected_at > 0.1:
        connected = (session.client_id for session in controller.clients if session.connection is not None)
        known.connected_at, known.connected = now, frozenset(connected)
    return known.connected


def in_words(writers: list[dict[str, Any]]) -> list[str]:
    """What `find_writers` found as parts of a sentence; fields of the same put share one."""
    together: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for writer in writers:
        together.setdefault((writer["client"], writer["partition"], round(writer["ago_s"])), []).append(writer)
    return [_written(group) for group in together.values()]


def _written(group: list[dict[str, Any]]) -> str:
    writer, names = group[0], join_names([each["field"] for each in group])
    if writer["client"] is None:
        return f"no client has written {names} since this controller started"
    were = "was" if len(group) == 1 else "were"
    task = f" (task {writer['task']!r})" if writer["task"] else ""
    words = (
        f"{names} {were} last written {writer['ago_s']:.0f} s ago in {writer['partition']!r} by "
        f"{writer['client']}{task}, which is {'connected' if writer['connected'] else 'gone'}"
    )
    if writer["clients"] > 1:
        words += f" ({writer['clients_connected']} of the {writer['clients']} clients that write it are connected)"
    return words


def explain_timeout(controller: Controller, command: Command, error: TransferQueueError) -> TransferQueueError:
    """The error of a timed-out fetch with the clients that should have written what was missing, unless clients must
    not know of each other. Other errors stay."""
    if not isinstance(error, WaitTimeoutError) or not isinstance(command, Fetch):
        return error
    if controller.access is not None and controller.access.limited:
        return error
    words = in_words(find_writers(controller, _missing(controller, command)))
    return WaitTimeoutError("; ".join([str(error), *words]))


def _missing(controller: Controller, command: Fetch) -> dict[str, int]:
    """The fields that rows lack, all fields if there are no rows; looked up once for all requests that end at the same
    moment, since this costs time in proportion to the partition."""
    partition = controller.core.state.partitions.get(command.partition)
    if partition is None or not partition.rows:
        return dict.fromkeys(command.fields, 0)
    now, known = controller.now(), controller.last_writes
    if now - known.missing_at > 0.1:
        known.missing_at, known.missing = now, {}
    key = command.partition, tuple(command.fields)
    if key not in known.missing:
        counts = controller.core.serving.missing(command, partition)
        known.missing[key] = {name: rows for name, rows in counts.items() if rows}
    return known.missing[key]


def explain(picture: dict[str, Any], partition: str | None = None) -> list[str]:
    """Sentences: the stage that holds up the others, if there is one, then the requests that wait, the longest wait
    first, and storage units that are missing.

    Args:
        picture: See ``transfer_queue.runtime.picture``.
        partition: Only requests for this partition.
    """
    waiters = [each for each in picture["waiters"] if partition in (None, each["partition"])]
    waiters.sort(key=lambda each: -each["waited_s"])
    found = list(_cause(waiters, picture["waiters"]))
    found += [_waits(each) for each in waiters]
    if not waiters:
        found.append("no request is waiting" + ("" if partition is None else f" for partition {partition!r}"))
        names = [each["name"] for each in picture["partitions"]]
        if partition is not None and partition not in names:
            found.append(f"there is no partition {partition!r}{did_you_mean([partition], names)}")
    connected = sum(unit["connected"] and not unit.get("on_device") for unit in picture["units"])
    if connected < picture["expected_units"]:
        found.append(f"{connected} of {picture['expected_units']} storage units are connected")
    return found


def _waits(waiter: dict[str, Any]) -> str:
    who = f"task {waiter['task']!r}" if waiter["kind"] == "fetch" else "a put"
    wanted = f"{waiter['rows']} row{'' if waiter['rows'] == 1 else 's'}"
    place = "of" if waiter["kind"] == "fetch" else "in"
    return (
        f"{who} has waited {waiter['waited_s']:.0f} s for {wanted} {place} {waiter['partition']!r}: {waiter['lacks']}"
    )


def _cause(waiters: list[dict[str, Any]], others: list[dict[str, Any]]) -> Iterator[str]:
    """The field, and its writer, at which most chains of waiting tasks end, if this is not plain from one request."""
    seconds: Counter[str] = Counter()
    writers: dict[str, dict[str, Any]] = {}
    held: dict[str, set[str]] = {}
    of_client: dict[str, dict[Any, dict[str, Any]]] = {}
    for each in others:  # one of each subscription: the others lack the same
        same = each["task"], each["partition"], tuple(each.get("fields", ()))
        of_client.setdefault(each.get("client", ""), {}).setdefault(same, each)
    for waiter in waiters:
        for writer in _roots(waiter, of_client, set(), []):
            field = writer["field"]
            writers.setdefault(field, writer)
            held.setdefault(field, set()).add(waiter["task"])
            seconds[field] += waiter["waited_s"]
    stages = (
        max(len({waiter["task"] for waiter in waiters}), len(in_words(waiters[0].get("writers", [])))) if waiters else 0
    )
    if not seconds or stages < 2:
        return
    field = seconds.most_common(1)[0][0]
    tasks = f"task{'' if len(held[field]) == 1 else 's'} {', '.join(map(repr, sorted(held[field])))}"
    writer = writers[field]
    waits = of_client.get(writer["client"] or "", {}).values()
    yield f"field {field!r} holds up {tasks}: {_written([writer])}{_slow(writer, list(waits))}"


def _slow(writer: dict[str, Any], waits: list[dict[str, Any]]) -> str:
    """Why the writer is to blame, and how fast its stage is. ``waits``: for what its client waits itself."""
    if writer["client"] is None:
        return ""
    if any(each["kind"] == "put" for each in waits):
        return " and waits in a put itself"
    if waits and (not writer["task"] or any(each["task"] == writer["task"] for each in waits)):
        return " and waits itself"
    words = f"; task {writer['task']!r} waits for nothing" if waits else " and waits for nothing itself"
    if not writer["connected"]:
        return words
    stage = repr(writer["task"]) if writer["task"] else "this stage"
    pace = writer.get("rows_s", 0.0)
    return f"{words}: {stage} itself is slow" + (f", at {pace:.2g} rows/s" if pace else "")


def _roots(
    waiter: dict[str, Any],
    of_client: dict[str, dict[Any, dict[str, Any]]],
    followed: set[int],
    found: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Follow the fields that most rows lack to the writers that do not wait themselves, and add these to ``found``.
    ``followed``: the ids of the waiters that were followed; each is followed once."""
    followed.add(id(waiter))
    writers = waiter.get("writers", ())
    most = max((writer["rows"] for writer in writers), default=0)
    for writer in writers:
        if 2 * writer["rows"] < most:
            continue
        behind = [
            each
            for each in of_client.get(writer["client"] or "", {}).values()
            if each["kind"] == "fetch"
            and writer["task"] in ("", each["task"])
            and writer["field"] not in each.get("fields", ())
        ]
        for each in behind:
            if id(each) not in followed:
                _roots(each, of_client, followed, found)
        if not behind:
            found.append(writer)
    return found
