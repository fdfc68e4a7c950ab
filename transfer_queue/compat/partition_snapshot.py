"""What ``TransferQueueController.get_partition_snapshot`` returns: a partition as programs of 0.1.x look at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_queue.client.client import Client
from transfer_queue.client.operation import Operation
from transfer_queue.control.commands import Lookup, Snapshot
from transfer_queue.errors import UnknownPartitionError

if TYPE_CHECKING:
    import torch

__all__ = ["PartitionSnapshot", "snapshot"]

_REQUEST_S = 60.0


@dataclass
class PartitionSnapshot:
    """A copy; changing it changes nothing in the queue.

    Attributes:
        partition_id: Its name.
        global_indexes: Of its rows.
        keys_mapping: Key -> global index.
        revert_keys_mapping: Global index -> key.
        custom_meta: Global index -> tag, of rows that have one.
        field_name_mapping: Field -> column of ``production_status``.
        production_status: int8 ``(largest index + 1, fields)``, 1 where the field is ready; sparse, as indexes are.
        consumption_status: Task -> int8 ``(largest index + 1,)``, 1 where it has consumed the row; sparse.
    """

    partition_id: str
    global_indexes: set[int]
    keys_mapping: dict[str, int]
    revert_keys_mapping: dict[int, str]
    custom_meta: dict[int, dict[str, Any]]
    field_name_mapping: dict[str, int]
    production_status: torch.Tensor
    consumption_status: dict[str, torch.Tensor]

    @property
    def total_samples_num(self) -> int:
        """Number of rows."""
        return len(self.global_indexes)

    @property
    def total_fields_num(self) -> int:
        """Number of fields."""
        return len(self.field_name_mapping)


def snapshot(client: Client, partition_id: str) -> PartitionSnapshot | None:
    """None: there is no such partition."""
    try:
        rows = _run(client, client.engine.lookup(Lookup(partition_id, locate=False), _REQUEST_S))
        counts = _run(client, client.engine.request(Snapshot(partition_id), _REQUEST_S)).value
    except UnknownPartitionError:
        return None
    indexes: list[int] = np.frombuffer(rows.indexes, "<i8").tolist()
    keys = {key: index for key, index in zip(rows.keys or [], indexes, strict=False) if key is not None}
    tags = {index: tag for index, tag in zip(indexes, rows.tags, strict=False) if tag}
    fields, size = list(counts["fields"]), max(indexes, default=-1) + 1
    ready = client.get_production_status(fields, partition_id) if fields else (None, None)
    return PartitionSnapshot(
        partition_id,
        set(indexes),
        keys,
        {index: key for key, index in keys.items()},
        tags,
        {name: column for column, name in enumerate(fields)},
        _sparse(*ready, (size, len(fields))),
        {task: _sparse(*client.get_consumption_status(task, partition_id), (size,)) for task in counts["tasks"]},
    )


def _run(client: Client, work: Any) -> Any:
    return client.run(Operation, work, lambda reply: reply)


def _sparse(indexes: torch.Tensor | None, status: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    """The status of each index, 0 of those that are no rows of the partition."""
    import torch

    if indexes is None or status is None:
        indexes, status = torch.zeros(0, dtype=torch.int64), torch.zeros((0, *shape[1:]), dtype=torch.int8)
    places = status.nonzero().T
    places[0] = indexes[places[0]]
    largest = int(indexes.max()) if len(indexes) else -1  # rows may have come since they were looked up
    size = (max(shape[0], largest + 1), *shape[1:])
    return torch.sparse_coo_tensor(places, status[status != 0], size, check_invariants=True).coalesce()
