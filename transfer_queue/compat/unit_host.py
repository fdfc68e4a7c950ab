"""A storage unit that starts once it is told its controller: 0.1.5 makes units first, and joins the two later."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

from transfer_queue.compat.join import JoinListener
from transfer_queue.compat.server_info import JOIN_PORT_NAME, Role, ZMQServerInfo
from transfer_queue.config.attach import parse_address
from transfer_queue.config.processes import StorageUnitConfig
from transfer_queue.config.security import ServerSecurity
from transfer_queue.errors import TransferQueueError
from transfer_queue.launch.process import ServerProcess, stop_all, wait_until_serving
from transfer_queue.runtime.secret import new_secret

__all__ = ["UnitHost"]

_START_S = 60.0
_SHARE = 1 / 16
"""Share of the free memory. The number of units on the machine is unknown; eight, the most in 0.1.x, take half."""


class UnitHost:
    """Waits on a port of ``host`` for the address of a controller, then runs a storage unit of its queue there.

    The first controller wins; the same one may be named again. ``capacity``: bytes of memory of the unit; None: a
    sixteenth of what is free when it starts, at least 1Gi.
    """

    def __init__(self, name: str, host: str, *, capacity: int | None = None) -> None:
        self.name = name
        self._host = host
        self._limits: dict[str, Any] = {"memory_share": _SHARE} if capacity is None else {"capacity": capacity}
        self._directory = Path(tempfile.mkdtemp(prefix="transferqueue-"))
        self._lock = threading.Lock()
        self._controller = ""
        self._token = new_secret()
        """Secret of the unit's info. Only processes that have the info may name the controller."""
        self._unit: ServerProcess | None = None
        self._joining = JoinListener(
            name,
            host,
            self._token,
            lambda asked: {"address": self.join(str(asked["controller"]), asked.get("secret"))},
        )

    def get_zmq_server_info(self) -> ZMQServerInfo:
        """Return the address that accepts the controller's address."""
        info = ZMQServerInfo(Role.STORAGE, self.name, self._host, {JOIN_PORT_NAME: self._joining.port})
        info.secret = self._token
        return info

    def join(self, controller: str, secret: str | None = None) -> str:
        """Run the unit of the controller at ``controller`` (host:port), whose queue has ``secret``; returns the unit's
        own address.

        Raises StartError, ConfigError.
        """
        parse_address(controller)
        with self._lock:
            if self._unit is None:
                config = StorageUnitConfig(
                    name=self.name,
                    host=self._host,
                    port=0,
                    controller=[controller],
                    security=ServerSecurity(secret=secret),
                    **self._limits,
                )
                unit = ServerProcess(self.name, "transfer_queue.runtime.storage_unit", config, self._directory)
                try:
                    for _ in wait_until_serving([unit], _START_S):
                        self._unit, self._controller = unit, controller
                finally:
                    if self._unit is None:
                        stop_all([unit])
            elif controller != self._controller:
                raise TransferQueueError(f"{self.name} is a unit of {self._controller}, not of {controller}")
            assert self._unit is not None
            return str(self._unit.address["address"])

    def shutdown(self) -> None:
        """End the unit. Idempotent."""
        self._joining.close()
        with self._lock:
            if self._unit is not None:
                stop_all([self._unit])
                self._unit = None
        shutil.rmtree(self._directory, ignore_errors=True)
