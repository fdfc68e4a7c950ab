"""The control plane without any thought of speed: dicts, lists and loops. The core must agree with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.unit.control.build import ints
from transfer_queue.control.commands import Commit, Fetch
from transfer_queue.sampler import PlannedSampler

Cell = tuple[int, int, int]  # unit, block, row in block


@dataclass
class Row:
    ordinal: int
    index: int
    key: str | None
    tag: dict[str, Any] = field(default_factory=dict)
    cells: dict[str, Cell] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    lengths: dict[str, int] = field(default_factory=dict)
    consumed: set[str] = field(default_factory=set)
    promised: set[str] = field(default_factory=set)
    leased: dict[str, Lease] = field(default_factory=dict)

    def ready(self, fields: Any) -> bool:
        return all(name in self.cells and name not in self.lost for name in fields)

    def takable(self, fields: Any, task: str) -> bool:
        return self.ready(fields) and not self.taken(task)

    def taken(self, task: str) -> bool:
        return task in self.consumed or task in self.promised or task in self.leased


@dataclass(eq=False)
class Lease:
    client: int
    seconds: float
    deadline: float
    dealt: bool


@dataclass
class Part:
    extents: list[int] = field(default_factory=list)
    created: int = 0
    rows: list[Row] = field(default_factory=list)  # that exist, in order of creation
    fields: list[str] = field(default_factory=list)
    dealt: dict[tuple[str, int, Any], list[Row]] = field(default_factory=dict)

    def by_key(self, key: str) -> Row | None:
        return next((row for row in self.rows if row.key == key), None)

    def by_index(self, index: int) -> Row | None:
        return next((row for row in self.rows if row.index == index), None)


class Refused(Exception):
    """The model refuses; the first argument is the name of the error class."""


@dataclass
class Wait:
    request: int
    command: Fetch | Commit
    deadline: float
    lacks_fields: bool = False
    client: int = 7


LATER = "later"


class Model:
    def __init__(self, sampler: PlannedSampler, capacity: int | None, extent: int) -> None:
        self.sampler = sampler
        self.capacity = capacity
        self.extent = extent
        self.extents = 0
        self.parts: dict[str, Part] = {}
        self.waits: list[Wait] = []
        self.lost_units: set[int] = set()
        self.suspect: set[tuple[int, int]] = set()
        self.frees: list[tuple[int, int]] = []
        self.answers: dict[int, Any] = {}
        self.now = 0.0
        self.leases: list[Lease] = []  # in the order of their beginning, those that are over too

    # --------------------------------------------------------------------------------------------------- commands

    def commit(self, command: Commit, request: int, deadline: float) -> Any:
        missing = self._missing(command)
        if {ref.unit for ref in command.blocks} & self.lost_units:
            raise Refused("DataLostError")
        if missing and self.capacity is not None and (not self._fits(missing) or self._commits()):
            if deadline <= 0 or missing > self.capacity:
                raise Refused("CapacityError")
            self.waits.append(Wait(request, command, deadline))
            return LATER
        return self._commit(command)

    def _commits(self) -> list[Wait]:
        return [wait for wait in self.waits if isinstance(wait.command, Commit)]

    def _fits(self, count: int) -> bool:
        return sum(len(part.rows) for part in self.parts.values()) + count <= (self.capacity or 10**9)

    def _missing(self, command: Commit) -> int:
        """How many rows it would create; refuses what is wrong."""
        part = self.parts.get(command.partition)
        if command.keys is not None:
            if len(set(command.keys)) != len(command.keys):
                raise Refused("InvalidInputError")
            return sum(part is None or part.by_key(key) is None for key in command.keys)
        if command.indexes is not None:
            indexes = ints(command.indexes)
            if part is None or any(part.by_index(index) is None for index in indexes):
                raise Refused("StorageKeyNotFoundError")
            if len(set(indexes)) != len(indexes):
                raise Refused("InvalidInputError")
            return 0
        return command.append

    def _commit(self, command: Commit) -> list[Row]:
        self._missing(command)
        part = self.parts.setdefault(command.partition, Part())
        before = self._blocks()
        if command.keys is not None:
            rows = [part.by_key(key) or self._create(part, key) for key in command.keys]
        elif command.indexes is not None:
            rows = [row for index in ints(command.indexes) if (row := part.by_index(index))]
        else:
            rows = [self._create(part, None) for _ in range(command.append)]
        for row, tag in zip(rows, command.tags or [{} for _ in rows], strict=True):
            row.tag.update(tag)
        for schema in command.fields:
            if schema.name not in part.fields:
                part.fields.append(schema.name)
        for ref in command.blocks:
            for offset in range(ref.rows):
                row = rows[ref.row_start + offset]
                for schema in command.fields:
                    row.cells[schema.name] = (ref.unit, ref.block, offset)
                    row.lost.discard(schema.name)
                    row.lengths.pop(schema.name, None)
                    if schema.name in command.lengths:
                        row.lengths[schema.name] = ints(command.lengths[schema.name], "<i4")[ref.row_start + offset]
        self._freed(before)
        self._serve(command.partition)
        return rows

    def _create(self, part: Part, key: str | None) -> Row:
        if part.created == len(part.extents) * self.extent:
            part.extents.append(self.extents * self.extent)
            self.extents += 1
        row = Row(part.created, part.extents[-1] + part.created % self.extent, key)
        part.created += 1
        part.rows.append(row)
        return row

    def fetch(self, command: Fetch, request: int, deadline: float, client: int = 7) -> Any:
        part = self.parts.get(command.partition)
        wait = Wait(request, command, deadline, client=client)
        if part is not None:
            blocked = any(not other.lacks_fields for other in self._line(command))
            got = self._draw(part, wait, not blocked)
            if got is not None:
                self._serve(command.partition)
                return got
        if deadline <= 0:
            return []
        self.waits.append(wait)
        return LATER

    def _line(self, command: Fetch) -> list[Wait]:
        def key(other: Fetch) -> Any:
            return other.partition, other.task, set(other.fields)

        return [wait for wait in self.waits if isinstance(wait.command, Fetch) and key(wait.command) == key(command)]

    def _draw(self, part: Part, wait: Wait, may_take: bool) -> list[Row] | None:
        command = wait.command
        assert isinstance(command, Fetch)
        draw = self.sampler.plan(command.batch_size, command.params)
        wait.lacks_fields = False
        dealt = part.dealt.get((command.task, draw.rank, draw.batch))
        if dealt is not None:
            if any(row not in part.rows for row in dealt):
                raise Refused("StorageKeyNotFoundError")
            if any(row.lost & set(command.fields) for row in dealt):
                raise Refused("DataLostError")
            if not all(row.ready(command.fields) for row in dealt):
                wait.lacks_fields = True
                return None
            self._hand_out([row for row in dealt if command.task not in row.consumed], wait, True)
            return dealt
        if not may_take:
            return None
        groups: dict[int, list[Row]] = {}
        for row in part.rows:
            if row.takable(command.fields, command.task):
                groups.setdefault(row.ordinal // self.sampler.group, []).append(row)
        ready = [row for group in groups.values() if len(group) == self.sampler.group for row in group]
        if len(ready) < draw.rows:
            return None
        rows = ready[: draw.rows]
        if draw.batch is not None:
            shares = {draw.rank: rows}
            if draw.ranks > 1:
                lengths = [row.tag.get("total_lengths", 1) for row in rows]
                shares = {
                    rank: [rows[i] for i in share]
                    for rank, share in enumerate(self.sampler.share(list(range(len(rows))), draw.ranks, lengths))
                }
            for rank, share in shares.items():
                part.dealt[command.task, rank, draw.batch] = share
                for row in share:
                    row.promised.add(command.task)
            rows = shares[draw.rank]
        self._hand_out(rows, wait, draw.batch is not None)
        return rows

    def _hand_out(self, rows: list[Row], wait: Wait, dealt: bool) -> None:
        command = wait.command
        assert isinstance(command, Fetch)
        seconds = command.lease_s or 0.0
        lease = Lease(wait.client, seconds, self.now + seconds, dealt)
        self.leases.append(lease)
        for row in rows:
            row.promised.discard(command.task)
            if seconds:
                row.leased[command.task] = lease
            else:
                row.consumed.add(command.task)
                row.leased.pop(command.task, None)

    def acknowledge(self, name: str, task: str, indexes: list[int]) -> None:
        part = self.parts.get(name)
        for row in part.rows if part is not None else []:
            if row.index in indexes:
                row.consumed.add(task)
                row.promised.discard(task)
                row.leased.pop(task, None)

    def client_gone(self, client: int) -> None:
        self._leave([wait for wait in self.waits if wait.client == client])
        for name in list(self.parts):
            for lease in [lease for lease in self.leases if lease.client == client]:
                self._end(lease, name)

    def _end(self, lease: Lease, name: str) -> None:
        """The rows of the partition that are under it go back."""
        part = self.parts[name]
        for task in {task for row in part.rows for task in row.leased}:
            rows = [row for row in part.rows if row.leased.get(task) is lease]
            groups = {row.ordinal // self.sampler.group for row in rows} if not lease.dealt else set()
            for row in part.rows:
                if row in rows:
                    del row.leased[task]
                    if lease.dealt:
                        row.promised.add(task)
                elif self.sampler.group > 1 and row.ordinal // self.sampler.group in groups:
                    row.consumed.discard(task)
        self._serve(name)

    def clear(self, name: str, chosen: Callable[[Row], bool] | None) -> None:
        part = self.parts.get(name)
        if part is None:
            return
        before = self._blocks()
        if chosen is None:
            del self.parts[name]
            for wait in self.waits:
                if wait.command.partition == name:
                    wait.lacks_fields = False
        else:
            part.rows = [row for row in part.rows if not chosen(row)]
        self._freed(before)
        self._serve(name)
        self._admit()

    def reset(self, name: str, task: str | None) -> None:
        part = self.parts.get(name)
        if part is None:
            return
        for row in part.rows:
            row.consumed = set() if task is None else row.consumed - {task}
            row.promised = set() if task is None else row.promised - {task}
            row.leased = {} if task is None else {name: row.leased[name] for name in row.leased if name != task}
        part.dealt = {key: rows for key, rows in part.dealt.items() if task is not None and key[0] != task}
        self._serve(name)

    def set_tags(self, name: str, indexes: list[int], tags: list[dict[str, Any]]) -> None:
        part = self.parts.get(name)
        if part is None or any(part.by_index(index) is None for index in indexes):
            raise Refused("StorageKeyNotFoundError")
        for index, tag in zip(indexes, tags, strict=True):
            row = part.by_index(index)
            assert row is not None
            row.tag.update(tag)

    # ------------------------------------------------------------------------------------------------------ events

    def unit_lost(self, unit: int) -> None:
        self.lost_units.add(unit)
        self.suspect |= {block for block in self._blocks() if block[0] == unit}
        self._lose(self.suspect, unit)
        for name in list(self.parts):
            self._serve(name)
        self._admit()

    def unit_joined(self, unit: int, inventory: set[int]) -> None:
        self.lost_units.discard(unit)
        own = {block for block in self.suspect if block[0] == unit}
        there = {block for block in own if block[1] in inventory}
        self._lose(own - there, unit)
        self.suspect -= there
        for part in self.parts.values():
            for row in part.rows:
                row.lost -= {name for name, cell in row.cells.items() if cell[:2] in there}
        for name in list(self.parts):
            self._serve(name)

    def _lose(self, blocks: set[tuple[int, int]], unit: int) -> None:
        for part in self.parts.values():
            for row in part.rows:
                row.lost |= {name for name, cell in row.cells.items() if cell[:2] in blocks and cell[0] == unit}

    def restart(self) -> None:
        """Connections are gone, state is back, units have yet to confirm what they hold."""
        self.waits.clear()
        for lease in self.leases:
            lease.deadline = self.now + lease.seconds
        self.suspect = self._blocks()

    def cancel(self, request: int) -> None:
        self._leave([wait for wait in self.waits if wait.request == request])

    def tick(self, now: float) -> None:
        self.now = now
        for lease in sorted(self.leases, key=lambda lease: lease.deadline):
            if lease.deadline <= now:
                for name in list(self.parts):
                    self._end(lease, name)
        for wait in sorted(self.waits, key=lambda wait: wait.deadline):
            if wait.deadline <= now and wait in self.waits:
                commit = isinstance(wait.command, Commit)
                self.answers[wait.request] = Refused("CapacityError" if commit else "WaitTimeoutError")
                self._leave([wait])

    def _leave(self, waits: list[Wait]) -> None:
        for wait in waits:  # none of them gets what the others leave
            self.waits.remove(wait)
        for wait in waits:
            if isinstance(wait.command, Commit):
                self._admit()
            else:
                self._serve(wait.command.partition)

    # ------------------------------------------------------------------------------------------------- consequences

    def _serve(self, name: str) -> None:
        """Answer whoever can be answered, until nobody can."""
        part = self.parts.get(name)
        progress = part is not None
        while progress and part is not None:
            progress = False
            blocked: list[Any] = []
            for wait in list(self.waits):
                command = wait.command
                if command.partition != name or not isinstance(command, Fetch):
                    continue
                line = (command.task, set(command.fields))
                try:
                    got = self._draw(part, wait, line not in blocked)
                except Refused as refused:
                    got = refused  # type: ignore[assignment]
                if got is None:
                    if not wait.lacks_fields:
                        blocked.append(line)
                    continue
                self.waits.remove(wait)
                self.answers[wait.request] = got if isinstance(got, Refused) else _frozen(got)
                progress = True

    def _admit(self) -> None:
        for wait in self._commits():
            command = wait.command
            assert isinstance(command, Commit)
            try:
                missing = self._missing(command)
                if {ref.unit for ref in command.blocks} & self.lost_units:
                    raise Refused("DataLostError")
                if not self._fits(missing):
                    return
                self.waits.remove(wait)
                self.answers[wait.request] = _frozen(self._commit(command))
            except Refused as refused:
                self.waits.remove(wait)
                self.answers[wait.request] = refused

    def _blocks(self) -> set[tuple[int, int]]:
        return {cell[:2] for part in self.parts.values() for row in part.rows for cell in row.cells.values()}

    def _freed(self, before: set[tuple[int, int]]) -> None:
        gone = before - self._blocks()
        self.suspect -= gone
        self.frees += sorted(gone)


def _frozen(rows: list[Row]) -> list[tuple[int, str | None]]:
    return [(row.index, row.key) for row in rows]
