"""Mooncake's own structured store over TCP: `MooncakeBundleTransfer`, with a pool of registered buffers.

Its references stay in this process: a catalog, which needs a host of its own, would add a request to each call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.data import Batch, Ragged
from bench.peers.mooncake_raw import MooncakeRaw

POOL_BYTES = 2 << 30


class MooncakeStructured(MooncakeRaw):
    def start(self, attach: dict[str, Any] | None) -> None:
        super().start(attach)
        from mooncake.buffer_pool import BufferPool
        from mooncake.structured_object_store import MooncakeBundleTransfer

        self._pool = BufferPool(self._store, max_bytes=POOL_BYTES, block_on_exhaustion=False)
        self._transfer = MooncakeBundleTransfer(self._store, buffer_pool=self._pool)
        self._ref: Any = None
        self._small: dict[int, Any] = {}

    def stop(self) -> None:
        self._pool.close()
        super().stop()

    def prepare(self, batch: Batch) -> dict[str, Any]:
        """Arrays as they are; ragged rows and texts as arrays of objects, as a DataProto has them."""
        fields: dict[str, Any] = {}
        for name, column in batch.items():
            if isinstance(column, np.ndarray):
                fields[name] = column
                continue
            bounds = zip(column.offsets, column.offsets[1:], strict=False) if isinstance(column, Ragged) else ()
            rows: Any = [column.values[a:b] for a, b in bounds] if isinstance(column, Ragged) else column
            fields[name] = np.empty(len(rows), object)
            fields[name][:] = rows
        return fields

    def put(self, prepared: Any) -> None:
        self._ref = self._transfer.put(prepared, type="dict")

    def get(self) -> Any:
        return self._transfer.get(self._ref, type="dict")

    def get_some(self, fields: list[str], rows: range) -> Any:
        return self._transfer.get(self._ref, type="dict", fields=fields, rows=slice(rows.start, rows.stop))

    def column(self, got: Any, name: str) -> Any:
        return np.asarray(got[name])

    def drop(self) -> None:
        self._transfer.cleanup_dataproto(self._ref)

    def prepare_small(self) -> dict[str, Any]:
        return {"x": np.zeros((1, 256), np.float32)}

    def put_small(self, number: int, prepared: dict[str, Any]) -> None:
        self._small[number] = self._transfer.put(prepared, type="dict")

    def get_small(self, number: int) -> Any:
        return self._transfer.get(self._small[number], type="dict")


PEER = MooncakeStructured
