"""The servers of a queue as child processes: ``tq up`` and ``init()`` without a cluster."""

from __future__ import annotations

import logging
import os
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import yaml

from transfer_queue.config.attach import AttachConfig, parse_address
from transfer_queue.config.document import Document
from transfer_queue.config.ownership import private_folder
from transfer_queue.config.processes import BackendChoice, ControllerConfig, SamplerChoice, StorageUnitConfig
from transfer_queue.config.running import CHECKPOINT_STATUS, Restart, read_report
from transfer_queue.config.security import ServerSecurity, TlsFiles, namespace_name
from transfer_queue.config.trouble import Trouble, clear_trouble, write_trouble
from transfer_queue.errors import ConfigError, StartError
from transfer_queue.launch.plan import (
    ATTACH_FILE,
    HOST,
    MASTER_LOG,
    POLICY_FILE,
    SERVER_NAME,
    TLS_FOLDER,
    LocalPlan,
)
from transfer_queue.launch.process import ServerProcess, stop_all, wait_until_serving, write_private
from transfer_queue.launch.restarts import Restarts
from transfer_queue.runtime.sampler import load_sampler
from transfer_queue.runtime.secret import new_secret

if TYPE_CHECKING:
    from transfer_queue.config.resource import Master
    from transfer_queue.launch.certificates import KeyPair
    from transfer_queue.storage.mooncake.master import MasterEndpoints, MasterProcess

__all__ = ["LocalStack", "default_plan"]

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
MIB = 1 << 20
_MOST_NOTED = 20
_LOOK_MS = 1000
_LEFT_FREE = 1 << 30
"""Bytes of a disk that arenas leave free."""
_AUTHORITY_LIFE, _LIFE = timedelta(days=3650), timedelta(days=90)
"""Validity of the authority of a queue, which is made at each start, and of its certificates, which are renewed."""
_BACKDATED = timedelta(days=2)
"""How long before the present they begin, so that a wall clock that is set back refuses nobody."""
_RENEW_AGAIN = timedelta(hours=1)
_RESTORE_S = 86400.0
"""Longest restore of a checkpoint."""
Progress = Callable[[str, float], None]
"""Called with (what is serving now, seconds since the start)."""


class LocalStack:
    """The processes of a :class:`LocalPlan`, up together and down together.

    They end with this process, however it ends. Logs are files in ``directory``; without one they go to a temporary
    folder that :meth:`stop` removes.
    """

    def __init__(self, plan: LocalPlan, directory: Path | None = None, *, timeout_s: float = 60.0) -> None:
        self.plan = plan
        self._keep = directory is not None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="transferqueue-"))
        self._timeout_s = timeout_s
        self._master: MasterProcess | None = None
        self._authority: KeyPair | None = None
        self._renew_from = datetime.min.replace(tzinfo=timezone.utc)
        self._certificate = b""
        self._controllers: list[ServerProcess] = []
        self._settings: list[ControllerConfig] = []
        self._progress: Progress = lambda what, after: None
        self._units: list[ServerProcess] = []
        self._savers: list[ServerProcess] = []
        """The process that saves the queue, if one does."""
        self._addresses: list[str] = []
        self._restarts: dict[str, Restarts] = {}
        self.restarts: list[Restart] = []
        """The last servers that ended and were started again."""
        self._tell: Callable[[str], None] | None = None
        self._stopping = False
        self._changing = threading.Lock()  # of the lists of servers, where a thread keeps the queue
        self.resources: Any = None
        """Resources of the bootstrap of a registered storage manager, kept as long as the queue."""

    def start(self, progress: Progress = lambda what, after: None) -> LocalStack:
        """Return when every process serves. Raises StartError with one line; then nothing is left running. A sampler
        that cannot be made is a ConfigError before anything is started."""
        began = self._began = time.monotonic()
        self._progress = progress
        with ExitStack() as undo:
            undo.callback(self.stop)
            load_sampler(self.plan.controller.sampler)
            self.directory.mkdir(parents=True, exist_ok=True)
            self._choose_folders()
            self._identify()
            if self.plan.tls:
                self._make_certificates()
            if master := self.plan.master:
                endpoints = self._start_master(master)
                self.plan = self.plan.with_backend_settings(endpoints.settings())
                ports = {
                    name: parse_address(address)[1]
                    for name, address in (
                        ("rpc_port", endpoints.master_server_address),
                        ("metrics_port", endpoints.admin_address),
                    )
                }  # a restarted master serves at the same ports
                self.plan = replace(self.plan, master=master.model_copy(update=ports))
                progress(f"mooncake_master at {endpoints.master_server_address}", time.monotonic() - began)
            self._settings = self.plan.controllers(self._controller_ports())
            for shard in range(len(self._settings)):
                self._controllers.append(self._spawn_controller(shard))
            for server in wait_until_serving(self._controllers, self._timeout_s):
                assert isinstance(server, ServerProcess)
                progress(f"{server.name} at {server.address['address']}", time.monotonic() - began)
            self._keep_addresses()
            for number in range(len(self.plan.units)):
                self._units.append(self._spawn_unit(number))
            for unit in wait_until_serving(self._units, self._timeout_s):
                progress(f"{unit.name} ready", time.monotonic() - began)
            self._start_saver()
            undo.pop_all()
        return self

    def _choose_folders(self) -> None:
        durability = self.plan.controller.durability
        if durability == "none":
            self._choose_arenas()
        if durability == "none" or self.plan.controller.journal is not None:
            return
        shared = SHARED_MEMORY / f"transferqueue-{os.getuid()}" / self.plan.name
        arenas = shared if durability == "process" else self.directory / "arenas"
        own = 2 if durability == "process" else 1
        private_folder(arenas, own, fix="set spec.controller.durability to node, which keeps rows in the state folder")
        journal = self.directory / "journal"
        expected = (
            {f"{shard}-of-{self.plan.shards}" for shard in range(self.plan.shards)} if self.plan.shards > 1 else {""}
        )
        kept = {path.name if path.is_dir() else "" for path in journal.glob("*")}
        if not kept <= expected:  # partitions would be looked for where they are not
            raise StartError(
                f"{journal} is of a queue with another number of controllers than {self.plan.shards}; set "
                "spec.controller.shards back, or remove the folder to start with an empty queue"
            )
        self.plan = self.plan.with_folders(journal, arenas)

    def _choose_arenas(self) -> None:
        """Keep the arenas in files, in the page cache, where shared memory has no room for them."""
        needed = sum(unit.capacity for unit in self.plan.units if unit.backend.kind == "simple")
        free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
        on_disk = shutil.disk_usage(self.directory).free
        if needed <= free:
            return
        advice = (
            f"enlarge {SHARED_MEMORY} (docker run --shm-size={-(-needed // MIB) + 64}m; in a pod an emptyDir of medium "
            f"Memory, mounted there), or lower the capacity of storage units (spec.storage.capacity; of init(): "
            "backend.SimpleStorage.unit_capacity)"
        )
        problem = f"{SHARED_MEMORY} has {free // MIB} MiB free, and the storage units take {needed // MIB} MiB"
        if needed > on_disk - _LEFT_FREE:
            raise StartError(f"{problem}; {self.directory}, with {on_disk // MIB} MiB, has no room either: {advice}")
        arenas = self.directory / "arenas"
        private_folder(arenas, fix="remove it")
        log.warning("%s: rows are kept in files below %s instead, which is slower; %s", problem, arenas, advice)
        self.plan = self.plan.with_arenas_on_disk(arenas)

    def _identify(self) -> None:
        """Give the queue its identity and secret, which are kept in its folder and survive a restart."""
        folder = self.directory / "identity"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

        def kept(name: str) -> str:
            path = folder / name
            if not path.exists() or not path.stat().st_size:
                write_private(path, new_secret().encode())
            return path.read_text()

        self.plan = self.plan.identified(kept("uid")[:32], kept("secret") if self.plan.needs_secret else None)

    def _controller_ports(self) -> list[int]:
        """Every controller has to know the ports of all of them, so that they are chosen before the start."""
        first, count = self.plan.controller.port, self.plan.shards
        if first or count == 1:
            return [first + shard for shard in range(count)]
        with ExitStack() as held:
            probes = [held.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
            return [int(probe.getsockname()[1]) for probe in probes]

    def _spawn_controller(self, shard: int) -> ServerProcess:
        name = "controller" if self.plan.shards == 1 else f"controller-{shard}"
        return self._spawn(name, "runtime.controller", self._settings[shard])

    def _keep_addresses(self) -> None:
        """Pin the ports of the controllers, so that a restarted controller serves at the same address."""
        self._addresses = self.controller_addresses
        self._settings = [
            settings.model_copy(
                update={
                    name: parse_address(server.address[key])[1]
                    for name, key in (("port", "address"), ("metrics_port", "metrics"))
                    if server.address.get(key)
                }
            )
            for settings, server in zip(self._settings, self._controllers, strict=True)
        ]
        if self._keep:
            clear_trouble(self.directory, self._addresses)

    def _spawn_unit(self, number: int) -> ServerProcess:
        config = self.plan.unit_configs(*self._addresses)[number]
        return self._spawn(config.name, "runtime.storage_unit", config)

    def _start_saver(self) -> None:
        """Restore the queue and begin to save it, as the resource says."""
        status = self.directory / CHECKPOINT_STATUS
        status.unlink(missing_ok=True)
        config = self.plan.checkpoint_config(self.directory, *self._addresses, restore=True)
        if config is None:
            return
        self._savers.append(self._spawn("checkpoint", "checkpoint.saver", config))
        for _ in wait_until_serving(self._savers, _RESTORE_S):
            report = read_report(status)
            if report and report.restored:
                self._progress(report.restored.message, self._age)
        if config.schedule is None:
            stop_all(self._savers)
            self._savers = []
        else:
            what = f"checkpoints go to {config.destination}, schedule {config.schedule}"
            self._progress(what, self._age)

    def _spawn_saver(self, number: int) -> ServerProcess:
        config = self.plan.checkpoint_config(self.directory, *self._addresses, restore=False)
        assert config is not None
        return self._spawn("checkpoint", "checkpoint.saver", config)

    def _make_certificates(self) -> None:
        """A CA, and certificates for the servers and for the programs of this user."""
        try:
            from transfer_queue.launch import certificates
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"spec.security.tls: certificates cannot be made here: {error}; install TransferQueue[tls], or set "
                'tls.mode "off"'
            ) from None
        folder, now = self.directory / TLS_FOLDER, datetime.now(timezone.utc)
        folder.mkdir(mode=0o700, exist_ok=True)
        authority = certificates.new_authority(f"TransferQueue {self.plan.name}", now - _BACKDATED, _AUTHORITY_LIFE)
        (folder / "ca.crt").write_bytes(authority.certificate)
        self._authority = authority
        self._issue_certificates(now)

        def files(name: str) -> TlsFiles:
            both = str(folder / f"{name}.pem")
            return TlsFiles(ca=str(folder / "ca.crt"), certificate=both, key=both)

        policy = self.directory / POLICY_FILE
        if self.plan.policy is not None:
            policy.write_text(yaml.safe_dump(self.plan.policy.dump(), sort_keys=False))
        servers = ServerSecurity(tls=files("server"), policy_file=None if self.plan.policy is None else str(policy))
        self.plan = self.plan.with_security(servers, files("client"))

    def _issue_certificates(self, now: datetime) -> None:
        """Of servers and clients, which read the files again at their next connection. The key of the authority is in
        no file."""
        from transfer_queue.launch import certificates

        assert self._authority is not None
        for name, names in (
            ("server", certificates.server_names([HOST, SERVER_NAME])),
            ("client", certificates.client_names(namespace_name(self.plan.namespace))),
        ):
            pair = certificates.issue(
                self._authority,
                f"transferqueue {name}",
                names,
                now - _BACKDATED,
                _LIFE + _BACKDATED,
                server=name == "server",
            )
            self._certificate = pair.certificate
            fresh = self.directory / TLS_FOLDER / f"{name}.new"
            write_private(fresh, pair.certificate + pair.key)
            fresh.replace(fresh.with_suffix(".pem"))  # one file, so that certificate and key always belong together

    def _renew_certificates(self) -> None:
        """When a third of their life is left."""
        if self._authority is None:
            return
        from transfer_queue.launch import certificates

        now = datetime.now(timezone.utc)
        if now < self._renew_from or not certificates.is_due(self._certificate, now):
            return
        try:
            self._issue_certificates(now)
        except StartError as error:  # the present ones are good for some time
            self._renew_from = now + _RENEW_AGAIN
            self._progress(f"certificates not renewed: {error}", self._age)
        else:
            self._progress("certificates renewed", self._age)

    def _spawn(self, name: str, module: str, config: Document) -> ServerProcess:
        return ServerProcess(name, f"transfer_queue.{module}", config, self.directory)

    def _start_master(self, master: Master) -> MasterEndpoints:
        from transfer_queue.storage.mooncake.loopback import can_confine
        from transfer_queue.storage.mooncake.master import MasterProcess
        from transfer_queue.storage.mooncake.settings import MasterSettings

        settings = MasterSettings(
            host=HOST,
            rpc_port=master.rpc_port,
            http_metadata_port=None,  # it would listen on all addresses
            metrics_port=master.metrics_port,
            start_timeout=self._timeout_s,
        )
        self._master = MasterProcess(settings, self.directory / MASTER_LOG)
        endpoints = self._master.start()
        exposed = [f"mooncake_master at {address}" for address in self._master.exposed()]
        if not can_confine():
            exposed.append("the transfer engine of each storage unit and program (Linux 5.7 or newer closes it)")
        if exposed:
            log.warning(
                "open to the network, without credentials: %s; keep others away by a firewall, or use the backend "
                "simple",
                ", ".join(exposed),
            )
        return endpoints

    @property
    def controller_addresses(self) -> list[str]:
        """host:port of each controller."""
        return self._addresses or [str(controller.address["address"]) for controller in self._controllers]

    @property
    def controller_address(self) -> str:
        """host:port that clients connect to; any of several controllers will do."""
        assert self._controllers, "the stack is not started"
        return self.controller_addresses[0]

    @property
    def page(self) -> str:
        """URL of the page that shows the queue; of the first controller if there are several.

        Empty if there is none: the page has no authentication, so a queue with a secret, TLS or tokens serves none.
        """
        if self.plan.controller.security != ServerSecurity():
            return ""
        metrics = self._controllers[0].address.get("metrics") if self._controllers else None
        return f"http://{metrics}/" if metrics else ""

    @property
    def attach_config(self) -> AttachConfig:
        return self.plan.attach_config(*self.controller_addresses).found_in("", folder=str(self.directory))

    def write_attach_config(self) -> Path:
        """Write the file that ``TQ_CONFIG_FILE`` names for programs that use the queue; returns its path."""
        path = self.directory / ATTACH_FILE
        write_private(path, yaml.safe_dump(self.attach_config.dump(), sort_keys=False).encode())
        return path

    @property
    def processes(self) -> list[ServerProcess]:
        """Controllers, storage units, and what saves them."""
        return [*self._controllers, *self._units, *self._savers]

    def restart_ended(self) -> None:
        """Restart servers that ended, at a bounded rate, without waiting for them. Raises StartError for a server that
        cannot start."""
        self._renew_certificates()
        rows = "all rows" if self.plan.shards == 1 else "the rows of its partitions"
        self._restart(self._controllers, self._spawn_controller, "" if self._durable else rows)
        self._restart_storage()
        self._restart(self._savers, self._spawn_saver, None)

    @property
    def _age(self) -> float:
        return time.monotonic() - self._began

    @property
    def _durable(self) -> bool:
        return self.plan.controller.durability != "none"

    def _restart_storage(self) -> None:
        """Restart everything but controllers, as `restart_ended`."""
        self._restart_master(time.monotonic())
        kept = self._durable and self.plan.controller.backend.kind == "simple"
        self._restart(self._units, self._spawn_unit, "" if kept else "its rows")

    def _restart(self, servers: list[ServerProcess], spawn: Callable[[int], ServerProcess], lost: str | None) -> None:
        """``lost``: the rows that are lost with a server; empty: none are; None: the servers hold no rows."""
        now = time.monotonic()
        for number, server in enumerate(servers):
            again = self._restarts.setdefault(server.name, Restarts(endless=lost is None))
            failure = server.failure()
            if failure is None:
                if again.starting and server.poll_ready():
                    self._serves(again, now, server.name)
            elif self._is_due(again, now, failure, lost):
                again.started()
                stop_all([server])
                servers[number] = spawn(number)

    def _restart_master(self, now: float) -> None:
        ended = self._master
        failure = None if ended is None else ended.failure()
        if failure is None or self.plan.master is None:
            return
        again = self._restarts.setdefault("mooncake_master", Restarts())
        if not self._is_due(again, now, failure, "all rows"):
            return
        again.started()
        try:
            self._start_master(self.plan.master)
        except StartError as error:
            self._master = ended
            again.ended(now, str(error))
        else:
            self._serves(again, now, "mooncake_master")

    def _is_due(self, again: Restarts, now: float, failure: str, lost: str | None) -> bool:
        if again.due is None:
            delay = again.ended(now, failure)
            when = f"in {delay:g} s" if delay else "now"
            rows = f", without {lost}, which are lost" if lost else ", with its rows" if lost is not None else ""
            what = f"{failure}; it is restarted {when}{rows}"
            self.restarts = [*self.restarts[1 - _MOST_NOTED :], Restart(time.time(), what)]
            self._progress(what, now - self._began)
            if lost is not None:  # programs do not wait for what saves the queue
                self.note("restarting", what)
        return again.due is not None and now >= again.due

    def _serves(self, again: Restarts, now: float, name: str) -> None:
        again.serves(now)
        self._progress(f"{name} serves again", now - self._began)
        if self._keep and self.failure() is None:
            clear_trouble(self.directory)

    created = True
    """Did this process start it? As for a queue in a Ray cluster."""

    def when_ended(self, tell: Callable[[str], None]) -> None:
        """Keep a queue without ``tq up``, from a thread: restart storage units that end, and say so in the log; call
        ``tell`` with the reason if a controller ends before ``stop``, or a unit cannot start. The end is noted
        for other programs, too. The last ``tell`` given counts."""
        watched, self._tell = self._tell is not None, tell
        if not watched:
            self._progress = lambda what, after: log.warning("%s", what)
            threading.Thread(target=self._watch, name="transferqueue-watch", daemon=True).start()

    def _watch(self) -> None:
        try:
            reason = self._keep_units()
        except StartError as error:
            reason = str(error)
        if self._stopping:
            return
        self._write_note("failed", reason)
        if self._tell is not None:
            self._tell(f"the queue that this program started has ended: {reason}")

    def _keep_units(self) -> str:
        """Restart storage units until ``stop`` or the end of a controller; return the reason of its end."""
        while True:
            self._wait_for_an_end()
            with self._changing:
                if self._stopping:
                    return ""
                for controller in self._controllers:
                    if controller.failure() is not None:
                        return controller.wait_for_end()
                self._restart_storage()

    def _wait_for_an_end(self) -> None:
        """Return once a controller or a storage unit has ended, or a restart or a look at the master is due."""
        with ExitStack() as held:
            poller = select.poll()
            with self._changing:
                for process in self.processes:
                    if process.failure() is None:
                        end = os.dup(process.fileno())
                        held.callback(os.close, end)
                        poller.register(end, 0)  # no events but the end of the process
                    elif self._restarts.setdefault(process.name, Restarts()).due is None:
                        return
            pending = self._master or any(again.due or again.starting for again in self._restarts.values())
            poller.poll(_LOOK_MS if pending else None)

    def note(self, state: Literal["restarting", "failed", "down"], reason: str) -> None:
        """Note the trouble of this queue for ``tq status`` and the programs of this machine."""
        if self._keep and self._addresses:
            self._write_note(state, reason)

    def _write_note(self, state: Literal["restarting", "failed", "down"], reason: str) -> None:
        note = Trouble(self.plan.name, self._addresses, reason, state, uid=self.plan.uid or "")
        write_trouble(self.directory, note)

    def failure(self) -> str | None:
        """One line about the first process that ended on its own; None while all run."""
        master = self._master.failure() if self._master else None
        failures = (process.failure() for process in self.processes)
        return master or next((failure for failure in failures if failure), None)

    def stop(self) -> None:
        """End every process, storage units first, so that none waits for one that is gone. Idempotent."""
        self._stopping = True
        with self._changing:
            stop_all(self._savers)
            stop_all(self._units)
            stop_all(self._controllers)
            if self._master:
                self._master.stop()
            self._savers, self._units, self._controllers, self._master, self.resources = [], [], [], None, None
        if not self._keep:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> LocalStack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def default_plan(
    sampler: SamplerChoice | None = None,
    *,
    units: int = 2,
    unit_capacity: int = 2**30,
    polling_mode: bool = False,
    sample_capacity: int | None = None,
    shards: int = 1,
    allow_pickle: bool = False,
) -> LocalPlan:
    """The queue that ``init()`` starts if it finds none: memory storage on free ports, with pickled values allowed."""
    return LocalPlan(
        name="local",
        controller=ControllerConfig(
            name="local",
            host=HOST,
            port=0,
            metrics_port=0,
            sampler=sampler or SamplerChoice(),
            polling_mode=polling_mode,
            sample_capacity=sample_capacity,
            expected_units=units,
        ),
        units=tuple(
            StorageUnitConfig(
                name=f"storage-{number}",
                host=HOST,
                port=0,
                controller=["unknown:0"],
                capacity=unit_capacity,
                backend=BackendChoice(),
            )
            for number in range(units)
        ),
        allow_pickle=allow_pickle,
        shards=shards,
    )
