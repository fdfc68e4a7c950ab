"""The actor classes of 0.1.5: a controller and storage units that the program makes itself, with Ray's options.

Each actor keeps one server process of its node; bytes never pass through Ray.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transfer_queue.client.client import TransferQueueClient
from transfer_queue.compat.utilities import get_node_ip_address
from transfer_queue.config.document import parse_bytes
from transfer_queue.config.processes import ControllerConfig, SamplerChoice
from transfer_queue.config.server_info import Role, ZMQServerInfo, server_info
from transfer_queue.errors import InvalidInputError, InvalidTypeError, StartError
from transfer_queue.launch.conf import sampler_choice
from transfer_queue.launch.process import ServerProcess, stop_all, wait_until_serving
from transfer_queue.launch.unit_host import UnitHost
from transfer_queue.sampler import BaseSampler, SequentialSampler

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from transfer_queue.metadata import BatchMeta

__all__ = ["ActorClass", "ControllerHost", "SimpleStorageUnit", "StorageUnitHost", "TransferQueueController"]

_START_S = 60.0


class ControllerHost:
    """Keeps a controller process. ``sampler``: a sampler's class or instance, or the name of a built-in one.

    Raises InvalidTypeError for another sampler, StartError.
    """

    def __init__(
        self,
        sampler: BaseSampler | type[BaseSampler] | str = SequentialSampler,
        polling_mode: bool = False,
        *,
        host: str | None = None,
    ) -> None:
        if not isinstance(sampler, str) and not issubclass(
            sampler if isinstance(sampler, type) else type(sampler), BaseSampler
        ):
            raise InvalidTypeError(f"sampler must be a BaseSampler, its class or its name, not {sampler!r}")
        name, arguments = sampler_choice(sampler)
        config = ControllerConfig(
            name="queue",
            host=host or get_node_ip_address(),
            port=0,
            metrics_port=0,
            sampler=SamplerChoice(name=name, args=arguments),
            polling_mode=polling_mode,
        )
        self._config: Any = None
        self._client: TransferQueueClient | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="transferqueue-"))
        self._server = ServerProcess("controller", "transfer_queue.runtime.controller", config, self._directory)
        started = False
        try:
            for _ in wait_until_serving([self._server], _START_S):
                started = True
        finally:
            if not started:
                self.shutdown()

    def get_zmq_server_info(self) -> ZMQServerInfo:
        """Where the controller answers."""
        return server_info(Role.CONTROLLER, "TransferQueueController", self._server.address["address"])

    def get_config(self) -> Any:
        """What `store_config` was given; None before."""
        return self._config

    def store_config(self, conf: Any) -> None:
        """Keep settings for others."""
        self._config = conf

    def start_metrics(self, port: int = 0) -> str:
        """``host:port`` of ``/metrics``, which is served from the start on any free port."""
        return str(self._server.address["metrics"])

    def list_partitions(self) -> list[str]:
        """Names in the order of creation."""
        return self._own_client().get_partition_list()

    def get_metadata(
        self,
        data_fields: list[str],
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        batch_size: int = 1,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """See ``TransferQueueClient.get_meta``."""
        return self._own_client().get_meta(data_fields, batch_size, partition_id, mode, task_name, sampling_config)

    def get_production_status(
        self, partition_id: str, data_fields: list[str]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See ``TransferQueueClient.get_production_status``, whose arguments come in the other order."""
        return self._own_client().get_production_status(data_fields, partition_id)

    def get_consumption_status(
        self, partition_id: str, task_name: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See ``TransferQueueClient.get_consumption_status``, whose arguments come in the other order."""
        return self._own_client().get_consumption_status(task_name, partition_id)

    def clear_partition(self, partition_id: str, clear_consumption: bool = True) -> None:
        """See ``TransferQueueClient.clear_partition``."""
        self._own_client().clear_partition(partition_id)

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """See ``TransferQueueClient.reset_consumption``."""
        return self._own_client().reset_consumption(partition_id, task_name)

    def kv_retrieve_meta(self, keys: list[str], partition_id: str, create: bool = False) -> BatchMeta:
        """See ``TransferQueueClient.kv_retrieve_meta``."""
        return self._own_client().kv_retrieve_meta(keys, partition_id, create)

    def kv_retrieve_keys(self, global_indexes: list[int], partition_id: str) -> list[str]:
        """See ``TransferQueueClient.kv_retrieve_keys``."""
        return self._own_client().kv_retrieve_keys(global_indexes, partition_id)

    def shutdown(self) -> None:
        """End the controller. Idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None
        stop_all([self._server])
        shutil.rmtree(self._directory, ignore_errors=True)

    def _own_client(self) -> TransferQueueClient:
        if self._client is None:
            self._client = TransferQueueClient("TransferQueueController", self.get_zmq_server_info())
        return self._client


class StorageUnitHost(UnitHost):
    """A storage unit as 0.1.5 (``storage_unit_size``) and 0.1.11 (``config``) make it.

    ``storage_unit_size``: a number of rows, which is checked and limits nothing here; memory does:
    ``config["unit_capacity"]`` (bytes, default 1Gi). Raises InvalidInputError.
    """

    def __init__(
        self,
        storage_unit_size: int | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        host: str | None = None,
    ) -> None:
        if storage_unit_size is not None and (type(storage_unit_size) is not int or storage_unit_size < 1):
            raise InvalidInputError(f"storage_unit_size must be a whole number from 1 on, not {storage_unit_size!r}")
        capacity = (config or {}).get("unit_capacity")
        super().__init__(
            f"unit-{uuid.uuid4().hex[:8]}",
            host or get_node_ip_address(),
            capacity=None if capacity is None else cast("int", parse_bytes(capacity)),
        )


class ActorClass:
    """A Ray actor class that needs Ray only when an actor is made. ``options`` may be replaced."""

    def __init__(self, host: type) -> None:
        self.host = host
        self.__doc__ = host.__doc__

    def options(self, **options: Any) -> Any:
        """The class with Ray's options for its actors; one logical CPU each by default.

        Raises StartError without Ray.
        """
        try:
            import ray
        except ImportError:
            raise StartError("actors need Ray: pip install 'TransferQueue[ray]'") from None
        return ray.remote(self.host).options(**{"num_cpus": 1, **options})

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Make an actor."""
        return self.options().remote(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise InvalidTypeError(f"{self.host.__name__}: actors are made with .remote(), not by calling the class")


TransferQueueController = ActorClass(ControllerHost)
SimpleStorageUnit = ActorClass(StorageUnitHost)
