"""The client side of a backend by itself, as plain calls from the test's thread."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from transfer_queue.client.engine import Engine
from transfer_queue.client.io import IoThread
from transfer_queue.columns.block import BlockView, EncodedBlock
from transfer_queue.columns.tensors import Piece, decode, encode
from transfer_queue.errors import CapacityError
from transfer_queue.storage.base import Backend, BlockRead, Capabilities, Fetched, UnitInfo
from transfer_queue.storage.conformance.servers import wait_until

__all__ = ["BlockClient", "block_bytes", "block_of_bytes", "decoded", "mixed_block"]

_CALL_S = 120.0


class _Engine(Engine):
    """A client whose backend and units can be used by hand."""

    async def backend(self) -> Backend:
        return await self._backend.ready()

    def units(self) -> list[UnitInfo]:
        return sorted(self._placement.candidates(0), key=lambda info: info.unit)

    def new_block(self, unit: UnitInfo) -> int:
        number = (self._backend.writer << 32) | next(self._counter)
        self._session.announce(unit.unit, number)  # needed by backends that do not track writers
        return number


class BlockClient:
    """One client. What it stored goes with it."""

    def __init__(self, address: str) -> None:
        self._io = IoThread()
        self._engine = self._io.wait(self._opened(address), _CALL_S)
        self.backend = self._io.wait(self._engine.backend(), _CALL_S)
        self.units: list[UnitInfo] = wait_until(self._two_units, "both storage units are registered")
        self._stored: dict[int, UnitInfo] = {}

    async def _opened(self, address: str) -> _Engine:
        engine = _Engine([address], "conformance", self._io.run_copy)  # on its loop
        await engine.open(60.0)
        return engine

    def _two_units(self) -> list[UnitInfo]:
        units = self._engine.units()
        return units if len(units) == 2 else []

    @property
    def capabilities(self) -> Capabilities:
        return self.backend.capabilities

    def put(self, block: EncodedBlock, unit: UnitInfo, *, wait_s: float = 30.0) -> int:
        """Store ``block``; its number."""
        number = self._engine.new_block(unit)
        self.put_as(number, block, unit, wait_s=wait_s)
        return number

    def put_as(self, number: int, block: EncodedBlock, unit: UnitInfo, *, wait_s: float = 30.0) -> None:
        self._stored[number] = unit
        stored = self._io.wait(self.backend.put(block, number, unit, wait_s=wait_s), _CALL_S)
        assert stored >= block.nbytes

    def get(self, reads: Sequence[BlockRead], *, timeout_s: float = 60.0) -> Fetched:
        return self._io.wait(self.backend.get(reads, timeout_s=timeout_s), _CALL_S)

    def read(self, number: int, unit: UnitInfo) -> bytes:
        """All bytes of one block."""
        fetched = self.get([BlockRead(unit, number)])
        try:
            return block_bytes(fetched.blocks[0].view)
        finally:
            fetched.release()

    def discard(self, number: int, unit: UnitInfo) -> None:
        self._io.wait(self.backend.discard(number, unit), _CALL_S)

    def unknown_block(self, unit: UnitInfo) -> int:
        """A number under which nothing is stored."""
        return self._engine.new_block(unit)

    def fill(self, unit: UnitInfo, nbytes: int) -> dict[int, EncodedBlock]:
        """Store blocks of ``nbytes`` until the unit refuses one; all that it took."""
        stored: dict[int, EncodedBlock] = {}
        while sum(block.nbytes for block in stored.values()) <= unit.capacity:
            block = block_of_bytes(nbytes)
            try:
                stored[self.put(block, unit, wait_s=0.2)] = block
            except CapacityError:
                return stored
        raise AssertionError(f"the unit took more than its capacity of {unit.capacity} bytes")

    def close_backend(self) -> None:
        self._stored.clear()
        self._io.wait(self.backend.close(), _CALL_S)

    def close(self) -> None:
        for number, unit in self._stored.items():
            self.discard(number, unit)
        self._io.wait(self._engine.close(), _CALL_S)
        self._io.stop()


_seeds = itertools.count()


def block_of_bytes(nbytes: int, rows: int = 64) -> EncodedBlock:
    """A block of about ``nbytes`` bytes in one dense field; each call gives other ones."""
    values = np.random.default_rng(next(_seeds)).integers(0, 256, (rows, nbytes // rows), np.uint8)
    return encode({"x": torch.from_numpy(values)})


def mixed_block(rows: int) -> tuple[dict[str, list[Any]], EncodedBlock]:
    """A block with a field of every kind, and what each row of them is."""
    values: dict[str, list[Any]] = {
        "dense": list(torch.randn(rows, 3, 2).to(torch.bfloat16)),
        "scalar": list(torch.arange(rows, dtype=torch.int64)),
        "ragged": [torch.arange(row % 5, dtype=torch.int32) for row in range(rows)],
        "text": [f"zeile-{row} ü" * (row % 3) for row in range(rows)],
        "object": [{"row": row, "nested": [None, {"deep": [row, "x"]}]} if row % 4 else None for row in range(rows)],
    }
    encoded = encode(
        {
            "dense": torch.stack(values["dense"]),
            "scalar": torch.stack(values["scalar"]),
            "ragged": torch.nested.as_nested_tensor(values["ragged"], layout=torch.jagged),
            "text": values["text"],
            "object": values["object"],
        }
    )
    return values, encoded


def block_bytes(view: BlockView) -> bytes:
    return bytes(view.select(None, None).to_bytes())


def decoded(block: Any, fields: Sequence[str]) -> dict[str, list[Any]]:
    """Rows of ``fields`` of a ``FetchedBlock``."""
    view, rows = block
    schemas = [schema for schema in view.fields if schema.name in fields]
    if rows is None:
        count = view.rows
    else:
        count = rows[1] - rows[0] if isinstance(rows, tuple) else len(rows)
    pieces = {schema.name: [Piece(view, rows, (0, count))] for schema in schemas}
    result = decode(pieces, count, schemas, layout="dense", allow_pickle=False)
    return {name: rows_of(result[name]) for name in fields}


def rows_of(column: Any) -> list[Any]:
    """The rows of a field of a TensorDict."""
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    return list(column)
