"""The calls that programs of 0.1.x make on the controller's actor, carried out by a client of the queue."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from transfer_queue.client.client import Client
from transfer_queue.compat.partition_snapshot import PartitionSnapshot, snapshot
from transfer_queue.compat.server_info import Role, ZMQServerInfo, attach_config, server_info

if TYPE_CHECKING:
    import torch

    from transfer_queue.metadata import BatchMeta

__all__ = ["CALLS", "ControllerCalls"]

CALLS = (
    "get_zmq_server_info",
    "get_config",
    "store_config",
    "start_metrics",
    "list_partitions",
    "get_partition_snapshot",
    "get_metadata",
    "get_production_status",
    "get_consumption_status",
    "clear_partition",
    "reset_consumption",
    "kv_retrieve_meta",
    "kv_retrieve_keys",
)


class ControllerCalls(ABC):
    """May be called from any thread."""

    def __init__(self) -> None:
        self.secret: str | None = None
        """Secret of the queue; see ``PeerSecurity``."""
        self._config: Any = None
        self._client: Client | None = None
        self._client_lock = threading.Lock()

    @abstractmethod
    def server_address(self) -> dict[str, Any]:
        """``address`` of the controller, and ``metrics`` where it serves them: host:port."""

    def get_zmq_server_info(self) -> ZMQServerInfo:
        """Return the address of the controller."""
        return server_info(Role.CONTROLLER, "TransferQueueController", self.server_address()["address"], self.secret)

    def get_config(self) -> Any:
        """Return the settings of `store_config`; None before."""
        return self._config

    def store_config(self, conf: Any) -> None:
        """Keep settings for others."""
        self._config = conf

    def start_metrics(self, port: int = 0) -> str:
        """``host:port`` of ``/metrics``, which is served from the start or not at all (then it is empty)."""
        return str(self.server_address().get("metrics") or "")

    def list_partitions(self) -> list[str]:
        """Names in the order of creation."""
        return self._own_client().get_partition_list()

    def get_partition_snapshot(self, partition_id: str) -> PartitionSnapshot | None:
        """Return rows, keys, tags and states of a partition; None if there is no such partition."""
        return snapshot(self._own_client(), partition_id)

    def get_metadata(
        self,
        data_fields: list[str],
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        batch_size: int = 1,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """See ``Client.get_meta``."""
        return self._own_client().get_meta(data_fields, batch_size, partition_id, mode, task_name, sampling_config)

    def get_production_status(
        self, partition_id: str, data_fields: list[str]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See ``Client.get_production_status``, whose arguments come in the other order."""
        return self._own_client().get_production_status(data_fields, partition_id)

    def get_consumption_status(
        self, partition_id: str, task_name: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See ``Client.get_consumption_status``, whose arguments come in the other order."""
        return self._own_client().get_consumption_status(task_name, partition_id)

    def clear_partition(self, partition_id: str, clear_consumption: bool = True) -> None:
        """See ``Client.clear_partition``."""
        self._own_client().clear_partition(partition_id)

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """See ``Client.reset_consumption``."""
        return self._own_client().reset_consumption(partition_id, task_name)

    def kv_retrieve_meta(self, keys: list[str], partition_id: str, create: bool = False) -> BatchMeta:
        """See ``Client.kv_retrieve_meta``."""
        return self._own_client().kv_retrieve_meta(keys, partition_id, create)

    def kv_retrieve_keys(self, global_indexes: list[int], partition_id: str) -> list[str]:
        """See ``Client.kv_retrieve_keys``."""
        return self._own_client().kv_retrieve_keys(global_indexes, partition_id)

    def close_client(self) -> None:
        """Give up the client. Idempotent."""
        with self._client_lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _own_client(self) -> Client:
        with self._client_lock:
            if self._client is None:
                self._client = Client("TransferQueueController", attach_config(self.get_zmq_server_info()))
            return self._client
