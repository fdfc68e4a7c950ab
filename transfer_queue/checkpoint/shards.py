"""The states of several controllers as one, and one state divided among several: pure arithmetic on plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from transfer_queue.control.blocks import COLUMNS
from transfer_queue.control.checkpoint import EXTENT_BITS, SHARD_BITS
from transfer_queue.control.directory import shard_of

__all__ = ["merge", "partitions_of_shard", "slot_offsets"]


def slot_offsets(captured: Sequence[Mapping[str, Any]]) -> list[int]:
    """What ``merge`` adds to the slots of each state's block table."""
    used = [content["state"]["blocks"]["used"] - 1 for content in captured]  # slot 0 is no block
    return [sum(used[:number]) for number in range(len(used))]


def merge(captured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One captured state with the partitions of all ``captured``, which are of different controllers.

    Row indexes change, as the controllers number their rows independently. Storage units are not told apart: the result
    can only be loaded by ``relocate``.
    """
    if len(captured) == 1:
        return dict(captured[0])
    states = [content["state"] for content in captured]
    partitions: list[dict[str, Any]] = []
    schemas: list[Any] = []
    extents = last = 0
    columns: dict[str, list[bytes]] = {name: [np.zeros(1, dtype).tobytes()] for name, dtype in COLUMNS.items()}
    for state, offset in zip(states, slot_offsets(captured), strict=True):
        partitions += [_moved(partition, offset, extents) for partition in state["partitions"]]
        extents += state["extents"]
        newest, found = state["blocks"]["schemas"]
        schemas += [[number + last, count, fields] for number, count, fields in found]
        for name, dtype in COLUMNS.items():
            values = np.frombuffer(state["blocks"][name], dtype)[1:]
            columns[name].append((values + last if name == "schema" else values).astype(dtype).tobytes())
        last += newest
    blocks = {
        "used": 1 + sum(state["blocks"]["used"] - 1 for state in states),
        "count": sum(state["blocks"]["count"] for state in states),
        "vacant": 0,
        "schemas": [last, schemas],
        **{name: b"".join(parts) for name, parts in columns.items()},
    }
    merged = {**states[0], "shard": 0, "extents": extents, "lost_units": [], "blocks": blocks, "partitions": partitions}
    names = {content["sampler"][0] for content in captured}
    sampler = [names.pop(), _union([content["sampler"][1] for content in captured])] if len(names) == 1 else ["", {}]
    return {"state": merged, "sampler": sampler}


def partitions_of_shard(captured: Mapping[str, Any], shard: int, shards: int) -> dict[str, Any]:
    """``captured`` with the partitions that one of so many controllers has."""
    state = captured["state"]
    partitions = [partition for partition in state["partitions"] if shard_of(partition["name"], shards) == shard]
    return {**captured, "state": {**state, "partitions": partitions}}


def _moved(partition: Mapping[str, Any], slots: int, extents: int) -> dict[str, Any]:
    """The partition with its slots and extents behind those of the partitions before it."""
    families = []
    for names, raw_slots, rows in partition["families"]:
        found = np.frombuffer(raw_slots, np.int32)
        families.append([names, (found + np.sign(found) * slots).astype(np.int32).tobytes(), rows])
    within = (1 << SHARD_BITS) - 1
    starts = [(start & within) + (extents << EXTENT_BITS) for start in partition["extents"]]
    return {**partition, "families": families, "extents": starts}


def _union(values: Sequence[Any]) -> Any:
    """The states of one sampler class in several controllers: dictionaries and lists are joined, of other values the
    largest counts."""
    first = values[0]
    if all(isinstance(value, dict) for value in values):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _union([value[name] for value in values if name in value]) for name in names}
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    return max(values) if all(isinstance(value, int | float) for value in values) else first
