"""Ready queues whose order comes from tags: by priority, and by weight with replacement."""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transfer_queue.control.arrays import Ints, Rows, as_positions, compact
from transfer_queue.control.ready import ReadyQueue, ReadyRows
from transfer_queue.sampler.planned import ByPriority, ByWeight, tag_number

__all__ = ["OrderedQueue", "ReadyPriorities", "ReadyWeights", "make_ordered_queue"]

_CHUNK = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class OrderedQueue(ReadyQueue):
    """Base of the queues that order rows by their tags. ``tags`` are the partition's, by position."""

    def __init__(self, capacity: int, tags: list[dict[str, Any]]) -> None:
        self._rows = ReadyRows(capacity)
        self._tags = tags
        self.unusable: set[int] = set()
        """Members whose tag is no number that makes sense."""

    @property
    def available(self) -> int:
        return self._rows.count

    def members(self) -> Ints:
        return self._rows.members()

    def retag(self, rows: Rows) -> None:
        """Tags of ``rows`` changed."""
        positions = as_positions(rows)
        members = positions[self._rows.view[rows] == 1]
        if len(members):
            self._forget(members)
            self._note(members)

    def add(self, rows: Rows) -> Rows | None:
        fresh = self._rows.add(rows)
        if fresh is not None:
            self._note(as_positions(fresh))
        return fresh

    def discard(self, rows: Rows) -> Rows | None:
        gone = self._rows.discard(rows)
        if gone is not None:
            self._forget(as_positions(gone))
        return gone

    def resize(self, capacity: int) -> None:
        self._rows.resize(capacity)

    def _note(self, positions: Ints) -> None:
        """Rows are members from now on, under their present tags."""
        raise NotImplementedError

    def _forget(self, positions: Ints) -> None:
        """What was noted of these rows no longer holds."""
        raise NotImplementedError


class ReadyPriorities(OrderedQueue):
    """A heap for each version. Entries of rows that left, or whose tags changed, are dropped when they come up."""

    def __init__(self, order: ByPriority, capacity: int, tags: list[dict[str, Any]]) -> None:
        super().__init__(capacity, tags)
        self._order = order
        self._priority = np.zeros(capacity)
        self._version = np.full(capacity, np.nan)
        self._heaps: dict[float, list[tuple[float, int]]] = {}
        self._counts: dict[float, int] = {}

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        more = capacity - len(self._priority)
        self._priority = np.concatenate((self._priority, np.zeros(more)))
        self._version = np.concatenate((self._version, np.full(more, np.nan)))

    def count_since(self, oldest: float) -> int:
        """Members of this version or a later one."""
        return sum(count for version, count in self._counts.items() if version >= oldest)

    def stale(self, oldest: float) -> Rows:
        """Remove and return the members of earlier versions."""
        found = [
            position
            for version in [version for version in self._counts if version < oldest]
            for priority, position in self._heaps[version]
            if self._holds(version, priority, position)
        ]
        rows = compact(np.unique(np.array(found, np.int64)))
        self.discard(rows)
        return rows

    def take(self, count: int, oldest: float = -math.inf) -> Rows:
        """Remove and return the ``count`` members of highest priority among those since ``oldest``; there must be as
        many."""
        heads = [
            (*head, version)
            for version in list(self._heaps)
            if version >= oldest and (head := self._head(version)) is not None
        ]
        heapq.heapify(heads)
        taken: list[int] = []
        while len(taken) < count:
            _, position, version = heads[0]
            taken.append(position)
            heapq.heappop(self._heaps[version])
            self.discard(slice(position, position + 1))
            if version in self._heaps and (head := self._head(version)) is not None:
                heapq.heapreplace(heads, (*head, version))
            else:
                heapq.heappop(heads)
        return compact(np.array(taken, np.int64))

    def _head(self, version: float) -> tuple[float, int] | None:
        heap = self._heaps[version]
        while heap and not self._holds(version, *heap[0]):
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _holds(self, version: float, priority: float, position: int) -> bool:
        return bool(self._version[position] == version and self._priority[position] == priority)

    def _note(self, positions: Ints) -> None:
        tags, nothing = self._tags, dict[str, Any]()
        name, version_name = self._order
        for position in positions.tolist():
            tag = tags[position] if tags else nothing
            priority, version = tag_number(tag, name, 0.0), tag_number(tag, version_name, 0.0)
            if priority is None or version is None:
                self.unusable.add(position)
                continue
            self._priority[position], self._version[position] = -priority, version
            heapq.heappush(self._heaps.setdefault(version, []), (-priority, position))
            self._counts[version] = self._counts.get(version, 0) + 1

    def _forget(self, positions: Ints) -> None:
        self.unusable.difference_update(positions.tolist())
        for version in self._version[positions].tolist():
            if version == version:  # NaN: it was unusable
                self._counts[version] -= 1
                if not self._counts[version]:
                    del self._counts[version], self._heaps[version]
        self._version[positions] = np.nan


class ReadyWeights(OrderedQueue):
    """Weights, and their sums over chunks of 256 rows: a draw looks at all sums and at the chunks that it hits."""

    def __init__(self, order: ByWeight, capacity: int, tags: list[dict[str, Any]]) -> None:
        super().__init__(capacity, tags)
        self._order = order
        self._weights = np.zeros((capacity // _CHUNK + 1, _CHUNK))
        self._sums = np.zeros(len(self._weights))

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        more = capacity // _CHUNK + 1 - len(self._weights)
        self._weights = np.concatenate((self._weights, np.zeros((more, _CHUNK))))
        self._sums = np.concatenate((self._sums, np.zeros(more)))

    def pick(self, count: int, seed: int) -> Rows | None:
        """``count`` members, each in proportion to its weight; None if no member has a weight above 0."""
        ends = np.cumsum(self._sums)
        if not ends[-1] > 0:
            return None
        aims = uniform(seed, count) * ends[-1]
        chunks = np.minimum(np.searchsorted(ends, aims, "right"), np.flatnonzero(self._sums)[-1])
        within = np.cumsum(self._weights[chunks], axis=1)
        rest = aims - (ends[chunks] - self._sums[chunks])
        rows = (within <= rest[:, None]).sum(axis=1)
        # Rounding may aim past the end of a chunk: its last row of any weight is meant.
        last = _CHUNK - 1 - (self._weights[chunks, ::-1] > 0).argmax(axis=1)
        return compact(chunks * _CHUNK + np.minimum(rows, last))

    def _note(self, positions: Ints) -> None:
        if not self._tags:
            self._write(positions, 1.0)
            return
        tags, name = self._tags, self._order.weight
        weights = np.zeros(len(positions))
        for number, position in enumerate(positions.tolist()):
            weight = tag_number(tags[position], name, 1.0)
            if weight is None or weight < 0:
                self.unusable.add(position)
            else:
                weights[number] = weight
        self._write(positions, weights)

    def _forget(self, positions: Ints) -> None:
        self.unusable.difference_update(positions.tolist())
        self._write(positions, 0.0)

    def _write(self, positions: Ints, weights: NDArray[np.float64] | float) -> None:
        self._weights.reshape(-1)[positions] = weights
        chunks = np.unique(positions // _CHUNK)
        self._sums[chunks] = self._weights[chunks].sum(axis=1)  # recomputed, so that rounding errors do not add up


def uniform(seed: int, count: int) -> NDArray[np.float64]:
    """Numbers from [0, 1) by SplitMix64, the same for the same seed."""
    state = np.uint64(seed) + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    shares: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return shares


def make_ordered_queue(order: ByPriority | ByWeight, capacity: int, tags: list[dict[str, Any]]) -> OrderedQueue:
    if isinstance(order, ByPriority):
        return ReadyPriorities(order, capacity, tags)
    return ReadyWeights(order, capacity, tags)
