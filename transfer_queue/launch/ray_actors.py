"""The actors of a queue in a Ray cluster. Each keeps one server process beside it and tells where it serves.

The bytes never pass through Ray: clients talk to the servers themselves. An actor's process holds the pipe that its
server lives by, so the server ends with the actor however that ends: killed, its node lost, or its owner gone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import ray
from ray.exceptions import RayError

from transfer_queue.compat.controller_calls import CALLS, ControllerCalls
from transfer_queue.config.attach import AttachConfig, join_address
from transfer_queue.config.derive import shard_configs
from transfer_queue.config.processes import BackendChoice, ControllerConfig, StorageUnitConfig
from transfer_queue.errors import StartError
from transfer_queue.launch.process import ServerProcess, wait_until_serving

if TYPE_CHECKING:
    from transfer_queue.config.resource import Master
    from transfer_queue.storage.mooncake.master import MasterEndpoints, MasterProcess

__all__ = ["MAX_CALLS", "ControllerActor", "StorageUnitActor"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_START_S = 60.0
_STOP_S = 10.0
_UNIT_STOP_S = 15.0
MAX_CALLS = 10_000
"""Calls that an actor may have open: every process that uses the queue waits in ``ended``."""


class _Supervisor:
    """Server processes of this node, listening on the node's address. The end of one is the end of all."""

    def __init__(self, module: str, configs: Mapping[str, ControllerConfig | StorageUnitConfig]) -> None:
        """``configs``: by the names of the servers. Raises StartError."""
        _pass_on_import_path()
        self._ended: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._ending = threading.Lock()
        self._stopping = ""
        self._servers: list[ServerProcess] = []
        self._watchers: list[threading.Thread] = []
        try:
            for name, config in configs.items():
                update: dict[str, Any] = {"host": _host(), "backend": _reaching_ray(config.backend)}
                self._servers.append(ServerProcess(name, module, config.model_copy(update=update), _log_folder(name)))
            for server in wait_until_serving(self._servers, _START_S):
                watcher = threading.Thread(target=self._watch, args=(server,), name="tq-server-watch", daemon=True)
                self._watchers.append(watcher)
                watcher.start()
        except StartError:
            self._end("")
            raise

    async def addresses(self) -> list[str]:
        """host:port of each server."""
        return [str(server.address["address"]) for server in self._servers]

    async def pid(self) -> int:
        """Process id of the first server, on this actor's node."""
        return self._servers[0].pid

    async def ended(self) -> str:
        """Return once the server has ended, with one line that says why."""
        return await _outcome(self._ended)

    async def stop(self, reason: str = "it was stopped") -> None:
        """End the server. Idempotent."""
        await asyncio.to_thread(self._end, reason)

    def _watch(self, server: ServerProcess) -> None:
        failure = server.wait_for_end()
        with self._ending:
            if not self._ended.done():
                self._ended.set_result(self._stopping or failure)
        for other in self._servers:
            other.terminate()

    def _end(self, reason: str) -> None:
        self._stopping = self._stopping or reason
        for server in self._servers:
            server.terminate()
        for watcher in self._watchers:
            watcher.join(_STOP_S)
        for server in self._servers:
            server.wait(_STOP_S)


class _Calls(ControllerCalls):
    def __init__(self, address: dict[str, Any], secret: str | None) -> None:
        super().__init__()
        self._address = address
        self.secret = secret

    def server_address(self) -> dict[str, Any]:
        return self._address


def _call(name: str) -> Any:
    """The method of `ControllerCalls` as one of the actor, which waits in a thread and not on the actor's loop."""

    @functools.wraps(getattr(ControllerCalls, name))
    async def call(self: ControllerActor, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(getattr(self.calls, name), *args, **kwargs)

    return call


class ControllerActor(_Supervisor):
    """Keeps the controllers, and knows the storage units, so that stopping it stops the whole queue.

    It answers the calls of `ControllerCalls` as well.
    """

    def __init__(self, plan: ControllerConfig, master: Master | None = None, shards: int = 1) -> None:
        """Start ``shards`` controllers with the settings of one.

        ``master``: also start a ``mooncake_master``, at its port if the port is free on this node."""
        self._master = None if master is None else _start_master(master)
        self._published: concurrent.futures.Future[tuple[AttachConfig, bool]] = concurrent.futures.Future()
        self._units: list[Any] = []
        plan = plan.model_copy(update={"backend": self._with_master(plan.backend)})
        super().__init__("transfer_queue.runtime.controller", _controllers(plan, shards))
        self.calls = _Calls(self._servers[0].address, plan.security.secret)

    async def publish(self, config: AttachConfig, detached: bool, units: list[Any]) -> None:
        """The queue is up: let others attach to it."""
        self._units = units
        self._published.set_result((config, detached))

    def _with_master(self, backend: BackendChoice) -> BackendChoice:
        endpoints = {} if self._master is None else self._master.endpoints.settings()
        return backend.model_copy(update={"settings": {**backend.settings, **endpoints}})

    async def backend(self, plan: BackendChoice) -> BackendChoice:
        """``plan`` with the endpoints of the master that runs here, if there is one."""
        return self._with_master(plan)

    async def attach_config(self) -> tuple[AttachConfig, bool]:
        """Return the attach settings of the queue, once it is up, and whether it is detached.

        Raises StartError if the controller has ended.
        """
        published = asyncio.create_task(_outcome(self._published))
        ended = asyncio.create_task(self.ended())
        await asyncio.wait({published, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise StartError(f"this queue is over: {ended.result()}")
        return await published

    async def units(self) -> list[Any]:
        """Handles of the storage units' actors."""
        return self._units

    async def stop(self, reason: str = "it was stopped") -> None:
        """End the storage units, then the controller. Idempotent."""
        units, self._units = self._units, []
        if units:
            asked = [asyncio.ensure_future(_result(unit.stop.remote())) for unit in units]
            await asyncio.wait(asked, timeout=_UNIT_STOP_S)
        for unit in units:
            ray.kill(unit, no_restart=True)
        await asyncio.to_thread(self.calls.close_client)
        await super().stop(reason)
        if self._master is not None:
            await asyncio.to_thread(self._master.process.stop)


for _name in CALLS:
    setattr(ControllerActor, _name, _call(_name))


class StorageUnitActor(_Supervisor):
    """Keeps one storage unit. Ends with the controller.

    Should its server end otherwise, it fails, so that Ray starts both again; they come back empty under their name.
    """

    def __init__(self, plan: StorageUnitConfig, controller: str, namespace: str) -> None:
        """``controller``: name of its actor in ``namespace``; a handle could not be passed again at a restart."""
        self._controller = ray.get_actor(controller, namespace)
        super().__init__("transfer_queue.runtime.storage_unit", {plan.name: plan})
        own = ray.get_runtime_context().current_actor
        threading.Thread(target=self._follow_controller, args=(own,), name="tq-follow", daemon=True).start()

    def _watch(self, server: ServerProcess) -> None:
        super()._watch(server)
        if not self._stopping:
            log.error("%s; starting again", self._ended.result())
            os._exit(1)

    def _follow_controller(self, own: Any) -> None:
        try:
            reason = self._controller.ended.remote().future().result()
        except RayError as error:
            reason = str(error)
        self._end(reason)
        ray.kill(own, no_restart=True)


def _host() -> str:
    return str(ray.util.get_node_ip_address())


def _controllers(plan: ControllerConfig, shards: int) -> dict[str, ControllerConfig]:
    """Settings of each controller by its name. Several have to know the ports of all before they start."""
    if shards == 1:
        return {"controller": plan}
    host = _host()
    with contextlib.ExitStack() as held:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        probes = [held.enter_context(socket.create_server((host, 0), family=family)) for _ in range(shards)]
        ports = [int(probe.getsockname()[1]) for probe in probes]
    configs = shard_configs(plan, [join_address(host, port) for port in ports], ports)
    return {f"controller-{shard}": config for shard, config in enumerate(configs)}


async def _outcome(future: concurrent.futures.Future[T]) -> T:
    """Wait for what many wait for: giving up does not cancel it for the others."""
    return await asyncio.shield(asyncio.wrap_future(future))


async def _result(reference: Any) -> None:
    """Wait for an actor's answer; one that died has stopped, too."""
    with contextlib.suppress(RayError):
        await reference


class _Master(NamedTuple):
    process: MasterProcess
    """Ends with this process."""
    endpoints: MasterEndpoints


def _start_master(master: Master) -> _Master:
    """On this node's address. Raises StartError."""
    from transfer_queue.storage.mooncake.master import MasterProcess
    from transfer_queue.storage.mooncake.settings import MasterSettings

    host = _host()
    settings = MasterSettings(
        host=host,
        rpc_port=_free_or_any(host, master.rpc_port),
        http_metadata_port=None,  # the engines ask each other
        metrics_port=0,
    )
    process = MasterProcess(settings, _log_folder("mooncake-master") / "mooncake_master.log")
    return _Master(process, process.start())


def _free_or_any(host: str, port: int) -> int:
    """Return ``port``, or 0 if it is in use. Other processes learn the actual port from the queue."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            log.warning("port %d of %s is in use; the Mooncake master takes another one", port, host)
            return 0
    return port


def _log_folder(name: str) -> Path:
    """Make a folder beside the logs of Ray's processes, so that its dashboard shows the logs and Ray removes them."""
    logs = ray._private.worker._global_node.get_logs_dir_path()
    return Path(tempfile.mkdtemp(prefix=f"transferqueue-{name}-", dir=logs))


def _reaching_ray(backend: BackendChoice) -> BackendChoice:
    """The object-store backend joins the cluster from outside its workers, so it has to be told where it is."""
    if backend.kind != "ray":
        return backend
    settings = {"address": ray.get_runtime_context().gcs_address, **backend.settings}
    return backend.model_copy(update={"settings": settings})


def _pass_on_import_path() -> None:
    """Let the server import what this worker can: the driver's path reaches workers only inside their process."""
    own = [os.path.abspath(entry) for entry in sys.path]
    foreign = [entry for entry in own if "site-packages" not in entry and "dist-packages" not in entry]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(foreign))
