"""The actor classes of 0.1.5: a controller and storage units that the program makes itself, with Ray's options.

Each actor keeps one server process of its node; bytes never pass through Ray.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transfer_queue.compat.actor_class import ActorClass, SimpleStorageUnit, TransferQueueController
from transfer_queue.compat.controller_calls import ControllerCalls
from transfer_queue.compat.join import JoinListener
from transfer_queue.compat.server_info import JOIN_PORT_NAME, ZMQServerInfo
from transfer_queue.compat.unit_host import UnitHost
from transfer_queue.compat.utilities import get_node_ip_address
from transfer_queue.config.attach import parse_address
from transfer_queue.config.document import parse_bytes
from transfer_queue.config.processes import ControllerConfig
from transfer_queue.config.security import ServerSecurity
from transfer_queue.errors import ConfigError, InvalidInputError, InvalidTypeError
from transfer_queue.launch.conf import mooncake_plan, sampler_choice
from transfer_queue.launch.process import ServerProcess, stop_all, wait_until_serving
from transfer_queue.runtime.secret import new_secret
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
        self._host = host or get_node_ip_address()
        secret = new_secret()
        config = self._settings = ControllerConfig(
            name="queue",
            host=self._host,
            port=0,
            metrics_port=0,
            sampler=sampler_choice(sampler),
            polling_mode=polling_mode,
            allow_pickle=True,
            security=ServerSecurity(secret=secret),
        )
        super().__init__()
        self.secret = secret
        self._directory = Path(tempfile.mkdtemp(prefix="transferqueue-"))
        self._server = ServerProcess("controller", "transfer_queue.runtime.controller", config, self._directory)
        self._store: dict[str, Any] | None = None
        self._unit: ServerProcess | None = None
        self._lock = threading.Lock()
        self._joining = JoinListener("controller", self._host, secret, self._join)
        started = False
        try:
            for _ in wait_until_serving([self._server], _START_S):
                started = True
        finally:
            if not started:
                self.shutdown()

    def get_zmq_server_info(self) -> ZMQServerInfo:
        """Addresses of the controller's requests and of the port that accepts its store."""
        info = super().get_zmq_server_info()
        info.ports[JOIN_PORT_NAME] = self._joining.port
        return info

    def _join(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Keep the queue's rows in the Mooncake store of ``asked["mooncake"]``, a section of settings that names a
        master. The first store wins; later calls must name the same store."""
        section = dict(asked["mooncake"])
        with self._lock:
            if self._store is None:
                self._move_to(section)
                self._store = section
            elif section != self._store:
                raise ConfigError(f"the queue keeps its rows in the store {self._store}, not in {section}")
        return {"address": self._server.address["address"]}

    def _move_to(self, section: dict[str, Any]) -> None:
        """Restart on Mooncake, at the same address, with one storage unit, which owns a segment."""
        address = str(self._server.address["address"])
        plan = mooncake_plan(section)
        self.close_client()
        stop_all([self._server])
        port = parse_address(address)[1]
        update = {"backend": plan.controller.backend, "port": port, "expected_units": 1}
        self._server = ServerProcess(
            "controller", "transfer_queue.runtime.controller", self._settings.model_copy(update=update), self._directory
        )
        unit = plan.unit_configs(address)[0].model_copy(
            update={"host": self._host, "security": self._settings.security}
        )
        for _ in wait_until_serving([self._server], _START_S):
            self._unit = ServerProcess(unit.name, "transfer_queue.runtime.storage_unit", unit, self._directory)
            for _ in wait_until_serving([self._unit], _START_S):
                pass

    def server_address(self) -> dict[str, Any]:
        return self._server.address

    def shutdown(self) -> None:
        """End the controller. Idempotent."""
        self._joining.close()
        self.close_client()
        stop_all([self._server] if self._unit is None else [self._unit, self._server])
        shutil.rmtree(self._directory, ignore_errors=True)


class StorageUnitHost(UnitHost):
    """A storage unit as 0.1.5 (``storage_unit_size``) and 0.1.11 (``config``) make it.

    ``storage_unit_size``: a number of rows, which is checked and limits nothing here; memory does:
    ``config["unit_capacity"]`` (bytes; default: a sixteenth of the free memory, at least 1Gi). Raises
    InvalidInputError.
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
