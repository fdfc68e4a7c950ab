"""Reads of located rows: which blocks to read, and the pieces of them that the decoder assembles."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from transfer_queue.control.commands import Batch, ColumnGroupLocations
from transfer_queue.control.schema import FieldSchema
from transfer_queue.errors import DataLostError
from transfer_queue.storage.base import BlockRead, Fetched, UnitInfo

if TYPE_CHECKING:
    from tensordict import TensorDict

    from transfer_queue.client.read_options import CheckedReadOptions
    from transfer_queue.columns.block import EncodedBlock
    from transfer_queue.columns.column import Rows
    from transfer_queue.columns.decoding import Piece

__all__ = ["LoadedBatch", "LoadedBatches", "ReadPlan", "plan_reads"]

_MOST_KEPT = 32
"""A column may keep all that was read for a batch in memory if that is at most this many times its own size."""


@dataclass(frozen=True)
class ReadPlan:
    """``reads[i]`` gives fields ``fields[i]`` of rows ``positions[i]`` of the batch."""

    reads: list[BlockRead]
    fields: list[list[str]]
    positions: list[Rows]

    def same_as(self, other: ReadPlan) -> bool:
        """Whether both read the same bytes for the same rows."""
        return (
            [(read.unit, read.block, read.fields) for read in self.reads]
            == [(read.unit, read.block, read.fields) for read in other.reads]
            and all(_same_rows(a.rows, b.rows) for a, b in zip(self.reads, other.reads, strict=True))
            and all(map(_same_rows, self.positions, other.positions))
        )


def _same_rows(first: Rows, second: Rows) -> bool:
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return np.array_equal(first, second)
    return type(first) is type(second) and not isinstance(first, np.ndarray) and first == second


def plan_reads(batch: Batch, fields: Iterable[str], unit: Callable[[int], UnitInfo | None]) -> ReadPlan:
    """Plan the reads of ``fields`` of all rows of ``batch``. Raises DataLostError for an unknown unit."""
    wanted = set(fields)
    plan = ReadPlan([], [], [])
    for family in batch.locations:
        names = [name for name in family.fields if name in wanted]
        if not names:
            continue
        for slot, positions, rows in _by_block(family):
            info = unit(family.units[slot])
            if info is None:
                raise DataLostError(f"storage unit {family.units[slot]}, which held {names}, is gone")
            plan.reads.append(BlockRead(info, family.blocks[slot], names, rows))
            plan.fields.append(names)
            plan.positions.append(positions)
    return plan


def _by_block(family: ColumnGroupLocations) -> Iterable[tuple[int, Rows, Rows]]:
    """(block slot, positions in the batch, rows in the block) for each block that is used."""
    slots = np.frombuffer(family.block_of_row, dtype="<i4")
    rows = np.frombuffer(family.row_in_block, dtype="<i4")
    if len(slots) == 0:
        return
    if len(family.blocks) == 1 or (slots[0] == slots).all():
        yield int(slots[0]), (0, len(slots)), _ranged(rows)
        return
    order = np.argsort(slots, kind="stable")
    bounds = np.flatnonzero(np.diff(slots[order])) + 1
    for positions in np.split(order, bounds):
        yield int(slots[positions[0]]), _ranged(positions), _ranged(rows[positions])


def _ranged(values: NDArray[np.int32] | NDArray[np.int64]) -> Rows:
    """Consecutive ascending numbers as a range: they are read and copied in one piece."""
    first, count = int(values[0]), len(values)
    if int(values[-1]) - first == count - 1 and (count < 3 or bool((np.diff(values) == 1).all())):
        return (first, first + count)
    return values.astype(np.int64)


class LoadedBatch:
    """Rows whose bytes are at hand, to be decoded once, in any thread."""

    def __init__(self, batch: Batch, fields: Sequence[str], plan: ReadPlan, fetched: Fetched | None) -> None:
        self._batch = batch
        self._fields = set(fields)
        self._plan = plan
        self._fetched = fetched
        self.rows = len(batch.indexes) // 8

    @property
    def batch(self) -> Batch:
        """Where the rows were read."""
        return self._batch

    def of(self, batch: Batch) -> LoadedBatch:
        """The same bytes for ``batch``, whose rows lie in the same places."""
        return LoadedBatch(batch, sorted(self._fields), self._plan, self._fetched)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are involved: an upper bound of what ``decode`` copies."""
        return sum(block.view.nbytes for block in self._fetched.blocks) if self._fetched else 0

    def column_bytes(self, field: str) -> bytes:
        """The stored bytes of a dense field, block by block, without torch."""
        if self._fetched is None:
            return b""
        blocks = zip(self._fetched.blocks, self._plan.fields, strict=True)
        return b"".join(
            block.view.column(field).take(block.rows).values.tobytes() for block, names in blocks if field in names
        )

    def parts(self) -> Iterator[tuple[list[int], EncodedBlock]]:
        """(positions in the batch, their fields as they are stored), a block each. Valid until ``release``."""
        if self._fetched is None:
            return
        for block, names, positions in zip(self._fetched.blocks, self._plan.fields, self._plan.positions, strict=True):
            numbers = np.arange(self.rows)
            chosen = numbers[slice(*positions)] if isinstance(positions, tuple) else numbers[positions]
            yield chosen.tolist(), block.view.select(names, block.rows)

    def decode(self, options: CheckedReadOptions) -> TensorDict:
        """The batch decoded with ``options``; what was read is released at once, or with the last view of it."""
        return LoadedBatches([(None, self)]).decode(options)

    @property
    def schemas(self) -> list[FieldSchema]:
        """Schemas of the fields that were read."""
        return [schema for schema in self._batch.fields if schema.name in self._fields]

    def add_pieces(self, pieces: dict[str, list[Piece]], outer: NDArray[np.int64] | None) -> None:
        from transfer_queue.columns.tensors import Piece

        if self._fetched is None:
            return
        for block, names, positions in zip(self._fetched.blocks, self._plan.fields, self._plan.positions, strict=True):
            if outer is not None and positions is not None:
                positions = outer[slice(*positions)] if isinstance(positions, tuple) else outer[positions]
            piece = Piece(block.view, block.rows, positions)
            for name in names:
                pieces[name].append(piece)

    @property
    def is_own(self) -> bool:
        """Whether only this read uses its memory, so that a batch may stay there."""
        return self._fetched is not None and self._fetched.is_own

    def release(self) -> None:
        if self._fetched is not None:
            self._fetched.release()

    def release_with_views(self) -> None:
        """Release once nothing refers to the blocks' memory any more: tensors that are views of it keep it."""
        if self._fetched is None:
            return
        fetched, self._fetched = self._fetched, None
        blocks = fetched.blocks.copy()
        fetched.blocks.clear()
        others = [None] * (len(blocks) - 1)  # all but the last to go; popping is atomic, in any thread

        def gone() -> None:
            try:
                others.pop()
            except IndexError:
                fetched.release()

        for block in blocks:
            weakref.finalize(block.view.memory, gone).atexit = False


class LoadedBatches:
    """Batches of the same fields that make one: row ``i`` of a part is row ``positions[i]`` of it. As `LoadedBatch`.

    Positions None: there is one part, and its rows are in order.
    """

    def __init__(self, parts: Sequence[tuple[NDArray[np.int64] | None, LoadedBatch]]) -> None:
        self._parts = parts

    @property
    def rows(self) -> int:
        return sum(part.rows for _, part in self._parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for _, part in self._parts)

    def decode(self, options: CheckedReadOptions) -> TensorDict:
        schemas = self._parts[0][1].schemas if self._parts else []
        try:
            pieces: dict[str, list[Piece]] = {schema.name: [] for schema in schemas}
            for positions, part in self._parts:
                part.add_pieces(pieces, positions)
            own = all(part.is_own for _, part in self._parts)
            least_view = self.nbytes // _MOST_KEPT if own and not options.zero_copy else 0
            copy = not (options.zero_copy or own)
            return _decoded(pieces, self.rows, schemas, options, copy=copy, least_view=least_view)
        finally:
            pieces = {}
            for _, part in self._parts:
                if options.zero_copy or part.is_own:
                    part.release_with_views()
                else:
                    part.release()

    def release(self) -> None:
        for _, part in self._parts:
            part.release()


def _decoded(
    pieces: dict[str, list[Piece]],
    rows: int,
    schemas: Sequence[FieldSchema],
    options: CheckedReadOptions,
    *,
    copy: bool,
    least_view: int,
) -> TensorDict:
    if not options.streams:
        return _decoded_into(pieces, rows, schemas, options, copy, least_view)
    from transfer_queue.columns.device import complete_on, pin

    for found in {id(piece.view): piece.view for given in pieces.values() for piece in given}.values():
        pin(found.memory)
    with complete_on(options.streams):
        return _decoded_into(pieces, rows, schemas, options, copy, least_view)


def _decoded_into(
    pieces: dict[str, list[Piece]],
    rows: int,
    schemas: Sequence[FieldSchema],
    options: CheckedReadOptions,
    copy: bool,
    least_view: int,
) -> TensorDict:
    from transfer_queue.columns.tensors import decode, decode_into

    if options.out is not None:
        decode_into(pieces, rows, schemas, options.out, allow_pickle=options.allow_pickle)
        out: TensorDict = options.out
        return out
    copied = copy and options.device is None
    return decode(
        pieces,
        rows,
        schemas,
        layout=options.layout,
        copy=copied,
        least_view=least_view,
        allow_pickle=options.allow_pickle,
        device=options.device,
    )
