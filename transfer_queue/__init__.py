"""TransferQueue: the data plane between rollout workers and trainers in reinforcement-learning post-training.

The import starts nothing and does not load torch. All names except the errors are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from transfer_queue.compat.paths import install_finder, legacy_attribute
from transfer_queue.errors import (
    CapacityError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    ConnectionLostError,
    CorruptBlockError,
    CorruptCheckpointError,
    CorruptJournalError,
    DataLostError,
    InvalidInputError,
    InvalidTypeError,
    JournalWriteError,
    KeyNotFoundError,
    LockLostError,
    NotAuthorizedError,
    NotInitializedError,
    NotReadyError,
    QueueNotEmptyError,
    RequestError,
    RowChangedError,
    SamplerError,
    StartError,
    StorageKeyNotFoundError,
    TransferQueueError,
    UnknownPartitionError,
    UnsupportedFieldError,
    UnsupportedRequestError,
    WaitTimeoutError,
    WorkerLostError,
)

if TYPE_CHECKING:
    from transfer_queue.checkpoint import (
        dump_data_by_key,
        load_checkpoint,
        load_data_by_key,
        read_row_index,
        save_checkpoint,
    )
    from transfer_queue.client.local_locks import (
        async_kv_local_lock,
        async_kv_local_locked,
        kv_local_lock,
        kv_local_locked,
    )
    from transfer_queue.compat.client import AsyncTransferQueueClient, TransferQueueClient
    from transfer_queue.compat.server_info import ZMQServerInfo as ZMQServerInfo
    from transfer_queue.compat.utilities import process_zmq_server_info as process_zmq_server_info
    from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
    from transfer_queue.dataloader.streaming_dataset import StreamingDataset
    from transfer_queue.interface import (
        async_kv_batch_get,
        async_kv_batch_get_by_meta,
        async_kv_batch_put,
        async_kv_clear,
        async_kv_list,
        async_kv_put,
        close,
        get_client,
        get_metrics_endpoint,
        init,
        kv_batch_get,
        kv_batch_get_by_meta,
        kv_batch_put,
        kv_clear,
        kv_list,
        kv_put,
        status,
    )
    from transfer_queue.locks import async_kv_global_lock, async_kv_update, kv_global_lock, kv_update
    from transfer_queue.metadata import BatchMeta, KVBatchMeta
    from transfer_queue.sampler import (
        BaseSampler,
        GRPOGroupNSampler,
        PrioritySampler,
        RankAwareSampler,
        ReplaySampler,
        SeqlenBalancedSampler,
        SequentialSampler,
        TokenBudgetSampler,
    )

__version__ = "0.2.0.dev0"

__all__ = [
    "AsyncTransferQueueClient",
    "BaseSampler",
    "BatchMeta",
    "CapacityError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConfigError",
    "ConnectionLostError",
    "CorruptBlockError",
    "CorruptCheckpointError",
    "CorruptJournalError",
    "DataLostError",
    "GRPOGroupNSampler",
    "InvalidInputError",
    "InvalidTypeError",
    "JournalWriteError",
    "KVBatchMeta",
    "KeyNotFoundError",
    "LockLostError",
    "NotAuthorizedError",
    "NotInitializedError",
    "NotReadyError",
    "PrioritySampler",
    "QueueNotEmptyError",
    "RankAwareSampler",
    "ReplaySampler",
    "RequestError",
    "RowChangedError",
    "SamplerError",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StartError",
    "StorageKeyNotFoundError",
    "StreamingDataLoader",
    "StreamingDataset",
    "TokenBudgetSampler",
    "TransferQueueClient",
    "TransferQueueError",
    "UnknownPartitionError",
    "UnsupportedFieldError",
    "UnsupportedRequestError",
    "WaitTimeoutError",
    "WorkerLostError",
    "__version__",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_global_lock",
    "async_kv_list",
    "async_kv_local_lock",
    "async_kv_local_locked",
    "async_kv_put",
    "async_kv_update",
    "close",
    "dump_data_by_key",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_global_lock",
    "kv_list",
    "kv_local_lock",
    "kv_local_locked",
    "kv_put",
    "kv_update",
    "load_checkpoint",
    "load_data_by_key",
    "read_row_index",
    "save_checkpoint",
    "status",
]

_HOMES = {
    "transfer_queue.checkpoint": (
        "dump_data_by_key",
        "load_checkpoint",
        "load_data_by_key",
        "read_row_index",
        "save_checkpoint",
    ),
    "transfer_queue.compat.client": ("AsyncTransferQueueClient", "TransferQueueClient"),
    "transfer_queue.dataloader": ("StreamingDataLoader", "StreamingDataset"),
    "transfer_queue.client.local_locks": (
        "async_kv_local_lock",
        "async_kv_local_locked",
        "kv_local_lock",
        "kv_local_locked",
    ),
    "transfer_queue.locks": ("async_kv_global_lock", "async_kv_update", "kv_global_lock", "kv_update"),
    "transfer_queue.metadata": ("BatchMeta", "KVBatchMeta"),
    "transfer_queue.sampler": (
        "BaseSampler",
        "GRPOGroupNSampler",
        "PrioritySampler",
        "RankAwareSampler",
        "ReplaySampler",
        "SeqlenBalancedSampler",
        "SequentialSampler",
        "TokenBudgetSampler",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

install_finder()


if not TYPE_CHECKING:  # with it, a misspelt name would pass for one of type Any

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            return legacy_attribute(__name__, name)
        value = getattr(importlib.import_module(_HOME_OF.get(name, "transfer_queue.interface")), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
