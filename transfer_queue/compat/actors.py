"""The actor classes of 0.1.5: a controller and storage units that the program makes itself, with Ray's options.

Each actor keeps one server process of its node; bytes never pass through Ray.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transfer_queue.compat.utilities import get_node_ip_address
from transfer_queue.config.document import parse_bytes
from transfer_queue.config.processes import ControllerConfig
from transfer_queue.errors import InvalidInputError, InvalidTypeError
from transfer_queue.launch.actor_class import ActorClass, SimpleStorageUnit, TransferQueueController
from transfer_queue.launch.conf import sampler_choice
from transfer_queue.launch.controller_calls import ControllerCalls
from transfer_queue.launch.process import ServerProcess, stop_all, wait_until_serving
from transfer_queue.launch.unit_host import UnitHost
from transfer_queue.sampler import BaseSampler, SequentialSampler

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ActorClass", "ControllerHost", "SimpleStorageUnit", "StorageUnitHost", "TransferQueueController"]

_START_S = 60.0


class ControllerHost(ControllerCalls):
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
        config = ControllerConfig(
            name="queue",
            host=host or get_node_ip_address(),
            port=0,
            metrics_port=0,
            sampler=sampler_choice(sampler),
            polling_mode=polling_mode,
        )
        super().__init__()
        self._directory = Path(tempfile.mkdtemp(prefix="transferqueue-"))
        self._server = ServerProcess("controller", "transfer_queue.runtime.controller", config, self._directory)
        started = False
        try:
            for _ in wait_until_serving([self._server], _START_S):
                started = True
        finally:
            if not started:
                self.shutdown()

    def server_address(self) -> dict[str, Any]:
        return self._server.address

    def shutdown(self) -> None:
        """End the controller. Idempotent."""
        self.close_client()
        stop_all([self._server])
        shutil.rmtree(self._directory, ignore_errors=True)


class StorageUnitHost(UnitHost):
    """A storage unit as 0.1.5 (``storage_unit_size``) and 0.1.11 (``config``) make it.

    ``storage_unit_size``: a number of rows, which is checked and limits nothing here; memory does:
    ``config["unit_capacity"]`` (bytes; default: an eighth of the free memory, at least 1Gi). Raises InvalidInputError.
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
