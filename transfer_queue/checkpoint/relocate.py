"""A controller's state with its blocks elsewhere: pure arithmetic on the arrays of the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transfer_queue.control.blocks import COLUMNS
from transfer_queue.control.checkpoint import NO_UNIT
from transfer_queue.control.commands import BlockRef

__all__ = ["partitions_of_slots", "relocate"]


def relocate(state: Mapping[str, Any], refs: Mapping[int, Sequence[BlockRef]]) -> dict[str, Any]:
    """``state`` as of ``control.snapshot.dump``, with the block of each slot in ``refs`` in the parts given there, in
    order of their rows. Blocks of other slots are lost."""
    old = {name: np.frombuffer(state["blocks"][name], dtype) for name, dtype in COLUMNS.items()}
    live = np.flatnonzero(old["cells"])
    parts: list[tuple[int, int, int, int, int]] = []  # old slot, unit, block, first row, bytes
    first_part = np.zeros(len(old["cells"]), np.int64)  # number in ``parts`` of a slot's first part
    for slot in live.tolist():
        first_part[slot] = len(parts)
        for ref in refs.get(slot, [BlockRef(NO_UNIT, 0, 0, 0, int(old["nbytes"][slot]))]):
            parts.append((slot, ref.unit, ref.block, ref.row_start, ref.nbytes))
    origin = np.array([part[0] for part in parts], np.int64)
    row_start = np.array([part[3] for part in parts] or [0], np.int64)
    lost = np.ones(len(old["cells"]), np.bool_)
    lost[list(refs)] = False
    starts = old["start"][origin]
    new: dict[str, NDArray[Any]] = {
        "unit": np.array([part[1] for part in parts], np.int32),
        "block": np.array([part[2] for part in parts], np.uint64),
        "start": np.where(starts < 0, -1, starts + row_start[: len(parts)]),
        "cells": np.zeros(len(row_start), np.uint32),
        "nbytes": np.array([part[4] for part in parts], np.int64),
        "schema": old["schema"][origin],
        "suspect": np.zeros(len(parts), np.uint8),
    }
    divided = _divided(refs, first_part)
    partitions = [_relocate_partition(p, old, new, first_part, row_start, lost, divided) for p in state["partitions"]]
    used: NDArray[np.bool_] = new["cells"][: len(parts)] > 0  # a part may hold nothing but rows that were cleared
    numbers = np.concatenate(([0], np.cumsum(used) * used))
    for partition in partitions:
        for family in partition["families"]:
            slots = np.frombuffer(family[1], np.int32)
            family[1] = (np.sign(slots) * numbers[np.abs(slots)]).astype(np.int32).tobytes()
    columns = {
        name: np.concatenate((np.zeros(1, dtype), new[name][: len(parts)][used].astype(dtype))).tobytes()
        for name, dtype in COLUMNS.items()
    }
    last, schemas = state["blocks"]["schemas"]
    counts = np.bincount(new["schema"][used], minlength=last + 1).tolist()
    schemas = [[number, counts[number], fields] for number, _, fields in schemas if counts[number]]
    count = int(used.sum())
    blocks = {"used": count + 1, "count": count, "vacant": 0, "schemas": [last, schemas], **columns}
    return {**state, "lost_units": [NO_UNIT], "blocks": blocks, "partitions": partitions}


def partitions_of_slots(state: Mapping[str, Any]) -> dict[int, str]:
    """Slot of each block that has rows -> the partition of these."""
    found: dict[int, str] = {}
    for partition in state["partitions"]:
        for _, raw_slots, _ in partition["families"]:
            slots = np.unique(np.abs(np.frombuffer(raw_slots, np.int32)))
            found.update(dict.fromkeys(slots.tolist(), partition["name"]))
    return found


def _divided(
    refs: Mapping[int, Sequence[BlockRef]], first_part: NDArray[np.int64]
) -> dict[int, tuple[int, NDArray[np.int64]]]:
    """Slot of a block in several parts -> (number of its first part, first rows of the parts)."""
    return {
        slot: (int(first_part[slot]), np.array([ref.row_start for ref in found], np.int64))
        for slot, found in refs.items()
        if len(found) > 1
    }


def _relocate_partition(
    partition: Mapping[str, Any],
    old: Mapping[str, NDArray[Any]],
    new: Mapping[str, NDArray[Any]],
    first_part: NDArray[np.int64],
    row_start: NDArray[np.int64],
    lost: NDArray[np.bool_],
    divided: Mapping[int, tuple[int, NDArray[np.int64]]],
) -> dict[str, Any]:
    """Slots become numbers of parts plus one, for now; counts the cells of the parts."""
    ordinals = np.arange(partition["used"], dtype=np.int64) + partition["base"]
    families = []
    touched = []
    for names, raw_slots, raw_rows in partition["families"]:
        signed = np.frombuffer(raw_slots, np.int32)
        slots = np.abs(signed)
        number = first_part[slots]
        starts = old["start"][slots]
        rows = np.where(starts < 0, 0 if raw_rows is None else np.frombuffer(raw_rows, np.int32), ordinals - starts)
        for slot, (first, bounds) in divided.items():
            hit = slots == slot
            number[hit] = first + np.searchsorted(bounds, rows[hit], "right") - 1
        written = slots > 0
        new["cells"][:] += (np.bincount(number[written], minlength=len(row_start)) * len(names)).astype(np.uint32)
        touched.append(number[written])
        sign = np.where((signed < 0) | lost[slots], -1, 1)
        if raw_rows is not None:
            scattered = written & (starts < 0)
            rows = np.where(scattered, rows - row_start[number * written], np.frombuffer(raw_rows, np.int32))
            raw_rows = rows.astype(np.int32).tobytes()
        families.append([names, (sign * (number + 1) * written).astype(np.int32).tobytes(), raw_rows])
    found = np.unique(np.concatenate(touched)) if touched else np.zeros(0, np.int64)
    return {**partition, "families": families, "nbytes": int(new["nbytes"][found].sum())}
