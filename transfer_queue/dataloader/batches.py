"""Fetching a batch and dividing it into micro-batches: the replaceable steps of a streaming dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from transfer_queue.client.client import Client
from transfer_queue.columns.nested import jagged, jagged_parts, strided_nested
from transfer_queue.errors import InvalidInputError, InvalidTypeError, WaitTimeoutError
from transfer_queue.metadata import BatchMeta

__all__ = ["WAIT_S", "chunk_batch_fn", "default_fetch_batch_fn", "fetch_batch"]

WAIT_S = 0.25
"""Time that one fetch waits at the controller, and thus the time in which a waiting worker notices a stop."""


def default_fetch_batch_fn(
    tq_client: Client,
    data_fields: Sequence[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: dict[str, Any],
    batch_index: int,
) -> tuple[TensorDict | None, BatchMeta]:
    """Exactly ``batch_size`` rows with ``data_fields``, or ``(None, empty metadata)`` if so many are not ready yet.

    Waits up to 0.25 s for them, not at all with the controller in polling mode. Raises what ``get_meta`` and
    ``get_data`` raise, but for a lack of rows.
    """
    config = {**sampling_config, "batch_index": batch_index}
    return fetch_batch(tq_client, data_fields, batch_size, partition_id, task_name, config, WAIT_S)


def fetch_batch(
    client: Client,
    fields: Sequence[str],
    rows: int,
    partition_id: str,
    task: str,
    sampling_config: dict[str, Any],
    wait_s: float,
    lease_s: float | None = None,
) -> tuple[TensorDict | None, BatchMeta]:
    """Like `default_fetch_batch_fn`, but wait up to ``wait_s`` seconds. ``lease_s``: see ``get_meta``."""
    try:
        meta = client.get_meta(
            fields, rows, partition_id, "fetch", task, sampling_config, timeout=wait_s, lease=lease_s
        )
    except WaitTimeoutError:
        if not wait_s > 0:
            raise
        # A lack of rows and a controller that does not answer look the same; without a wait only the latter raises.
        meta = client.get_meta(fields, rows, partition_id, "fetch", task, sampling_config, timeout=0, lease=lease_s)
    return (client.get_data(meta) if len(meta) else None), meta


def chunk_batch_fn(
    td: TensorDict, batch_meta: BatchMeta, micro_batch_size: int = 1
) -> list[tuple[TensorDict, BatchMeta]]:
    """Split ``td`` and ``batch_meta`` into pieces of ``micro_batch_size`` rows; the last piece may be shorter.

    Nested fields keep their layout, dense ones are views. Raises InvalidTypeError (a TypeError) if ``td`` is no
    TensorDict or ``batch_meta`` no BatchMeta, InvalidInputError (a ValueError) for a size below 1 or above the
    number of rows.
    """
    if not isinstance(td, TensorDict):
        raise InvalidTypeError(f"td must be a TensorDict, not {type(td).__name__}")
    if not isinstance(batch_meta, BatchMeta):
        raise InvalidTypeError(f"batch_meta must be a BatchMeta, not {type(batch_meta).__name__}")
    if isinstance(micro_batch_size, bool) or not isinstance(micro_batch_size, int) or micro_batch_size < 1:
        raise InvalidInputError(f"micro_batch_size must be a positive integer, not {micro_batch_size!r}")
    if not td.batch_size:
        raise InvalidInputError("td has an empty batch size: it has no rows")
    rows = int(td.batch_size[0])
    if micro_batch_size > rows:
        raise InvalidInputError(f"micro_batch_size {micro_batch_size} is larger than the batch, which has {rows} rows")
    if len(batch_meta) != rows:
        raise InvalidInputError(f"batch_meta has {len(batch_meta)} rows, td has {rows}")
    return list(_pieces(td, batch_meta, micro_batch_size))


def _pieces(td: TensorDict, meta: BatchMeta, size: int) -> Iterator[tuple[TensorDict, BatchMeta]]:
    for start in range(0, len(meta), size):
        part = slice(start, min(start + size, len(meta)))
        columns = {name: _rows_of(td.get(name), part) for name in td.keys()}  # noqa: SIM118  iteration is over rows
        yield TensorDict(columns, batch_size=[part.stop - part.start]), meta[part]


def _rows_of(column: Any, part: slice) -> Any:
    if not isinstance(column, torch.Tensor) or not column.is_nested:
        return column[part]
    if column.layout is torch.strided:
        return strided_nested(column.unbind()[part])
    parts = jagged_parts(column)
    if parts is None:
        return torch.nested.as_nested_tensor(list(column.unbind()[part]), layout=torch.jagged)
    values, offsets, axis = parts
    first, last = int(offsets[part.start]), int(offsets[part.stop])
    lengths = offsets.diff()[part]
    own = offsets[part.start : part.stop + 1] - first
    return jagged(values[first:last], own.to(values.device), axis, (int(lengths.min()), int(lengths.max())))
