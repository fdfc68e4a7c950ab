"""Short spellings of commands and replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transfer_queue.control import Answer, ControlCore, FreeBlocks, Journal
from transfer_queue.control.commands import Batch, BlockRef, Commit, Fetch
from transfer_queue.control.records import Record
from transfer_queue.control.schema import FieldSchema


def i64(*indexes: int) -> bytes:
    return np.array(indexes, np.int64).tobytes()


def ints(raw: bytes | None, dtype: str = "<i8") -> list[int]:
    assert raw is not None
    return np.frombuffer(raw, dtype).tolist()


def schema(*names: str, kind: Any = "dense", dtype: str = "float32", shape: Any = (4,)) -> list[FieldSchema]:
    return [FieldSchema(name, kind, dtype, shape) for name in names]


def put(
    partition: str,
    keys: Sequence[str] | int | bytes,
    fields: str | Sequence[FieldSchema] = "",
    *,
    block: int = 1,
    unit: int = 1,
    **more: Any,
) -> Commit:
    """A commit with one block: of new or existing keys, of so many appended rows, or of rows by i64 bytes."""
    schemas = schema(*fields) if isinstance(fields, str) else list(fields)
    rows = keys if isinstance(keys, int) else len(keys) // 8 if isinstance(keys, bytes) else len(keys)
    return Commit(
        partition,
        keys=None if isinstance(keys, int | bytes) else list(keys),
        indexes=keys if isinstance(keys, bytes) else None,
        append=keys if isinstance(keys, int) else 0,
        fields=schemas,
        blocks=[BlockRef(unit, block, 0, rows, 100)] if schemas else [],
        **more,
    )


def fetch(partition: str, fields: str, size: int, task: str = "t", timeout_s: float = 0.0, **params: Any) -> Fetch:
    return Fetch(partition, list(fields), size, task, timeout_s, params)


def rows(batch: Any) -> list[int]:
    assert isinstance(batch, Batch)
    return ints(batch.indexes)


def places(batch: Batch) -> dict[str, list[tuple[int, int, int] | None]]:
    """Field -> (unit, block, row in block) of each row of the batch, None where there is nothing."""
    found: dict[str, list[tuple[int, int, int] | None]] = {}
    for family in batch.locations:
        pairs = zip(ints(family.block_of_row, "<i4"), ints(family.row_in_block, "<i4"), strict=True)
        cells = [None if b < 0 else (family.units[b], family.blocks[b], row) for b, row in pairs]
        found.update({name: list(cells) for name in family.fields})
    return found


class Drained:
    """The effects of one drain, sorted."""

    def __init__(self, core: ControlCore) -> None:
        effects = core.drain_effects()
        self.answers = [effect for effect in effects if isinstance(effect, Answer)]
        self.frees = sorted(
            (effect.unit, block) for effect in effects if isinstance(effect, FreeBlocks) for block in effect.blocks
        )
        self.records: list[Record] = [effect.record for effect in effects if isinstance(effect, Journal)]

    @property
    def by_request(self) -> dict[int, Any]:
        """Request number -> its reply or error."""
        return {answer.request: answer.error or answer.reply for answer in self.answers}
