"""What both versions of TransferQueue have in common: the same calls, on whichever library is imported."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from bench.data import Batch, Ragged
from bench.peers.base import Peer

PARTITION = "batch"
_SMALL = torch.zeros(256)


class Queue(Peer):
    """A put of a batch is a ``kv_batch_put``, a get a ``kv_batch_get`` of all fields."""

    attached: dict[str, Any]
    """What a worker process needs to join this queue."""

    def __init__(self) -> None:
        self._keys: list[str] = []

    @property
    def client(self) -> Any:
        return tq.get_client()

    def prepare(self, batch: Batch) -> TensorDict:
        fields: dict[str, Any] = {}
        rows = 0
        for name, column in batch.items():
            if isinstance(column, list):
                fields[name] = NonTensorStack(*column)
            elif isinstance(column, Ragged):
                values, offsets = torch.from_numpy(column.values), torch.from_numpy(column.offsets)
                fields[name] = torch.nested.nested_tensor_from_jagged(values, offsets)
            else:
                fields[name] = torch.from_numpy(column)
                rows = len(column)
        self._keys = [f"row{row}" for row in range(rows)]
        return TensorDict(fields, batch_size=[rows])

    def put(self, prepared: TensorDict) -> None:
        tq.kv_batch_put(keys=self._keys, partition_id=PARTITION, fields=prepared)

    def get(self) -> TensorDict:
        return tq.kv_batch_get(self._keys, PARTITION)

    def get_some(self, fields: list[str], rows: range) -> TensorDict:
        return tq.kv_batch_get(self._keys[rows.start : rows.stop], PARTITION, select_fields=fields)

    def column(self, got: TensorDict, name: str) -> Any:
        value = got[name]
        return (value.values().reshape(value.shape[0], -1) if value.is_nested else value).numpy()

    def drop(self) -> None:
        self.client.clear_partition(PARTITION)

    def prepare_small(self) -> TensorDict:
        return TensorDict({"x": torch.zeros(1, 256)}, batch_size=[1])

    def put_small(self, number: int, prepared: TensorDict) -> None:
        tq.kv_batch_put(keys=[f"k{number}"], partition_id="small", fields=prepared)

    async def put_small_async(self, number: int) -> None:
        """Put the same row by an awaited call."""
        await tq.async_kv_put(f"a{number}", "small", {"x": _SMALL})

    def get_small(self, number: int) -> Any:
        return tq.kv_batch_get([f"k{number}"], "small")
