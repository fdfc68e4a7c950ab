"""Plan of the processes of a ``TransferQueue`` resource on one machine. Pure: settings in, settings out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from transfer_queue.config.attach import AttachConfig, AttachSecurity, ControllerAddresses
from transfer_queue.config.derive import Site, controller_config, shard_configs, unit_config
from transfer_queue.config.processes import BackendChoice, CheckpointConfig, ControllerConfig, StorageUnitConfig
from transfer_queue.config.resource import (
    Backend,
    Checkpoint,
    Master,
    Mooncake,
    Simple,
    Spec,
    SsdOffload,
    TransferQueue,
    Yuanrong,
    parse,
)
from transfer_queue.config.running import CHECKPOINT_STATUS
from transfer_queue.config.security import Policy, ServerSecurity, TlsFiles
from transfer_queue.config.trouble import TROUBLE_FILE
from transfer_queue.errors import ConfigError

__all__ = [
    "ATTACH_FILE",
    "HOST",
    "MASTER_LOG",
    "MEMORY_SHARE",
    "POLICY_FILE",
    "SERVER_NAME",
    "TLS_FOLDER",
    "LocalPlan",
    "plan_local",
    "with_backend",
]

HOST = "127.0.0.1"
"""Address of the servers: a local queue is not reachable from other machines."""
MEMORY_SHARE = 0.5
"""Share of a machine's free memory for its storage units without their own limit."""
SERVER_NAME = "localhost"
"""A name of the servers' certificate."""
ATTACH_FILE, POLICY_FILE, MASTER_LOG, TLS_FOLDER = "attach.yaml", "policy.yaml", "mooncake_master.log", "tls"
"""Names in the folder of a queue."""


@dataclass(frozen=True)
class LocalPlan:
    """Settings of the processes of one queue. ``master`` is None for backends without one."""

    name: str
    controller: ControllerConfig
    units: tuple[StorageUnitConfig, ...]
    """Their ``controller`` address is filled in when it is known: see :meth:`unit_configs`."""
    master: Master | None = None
    layout: str = "jagged"
    allow_pickle: bool = False
    shards: int = 1
    """Controllers that share the partitions; what is special to each of them is added by :meth:`controllers`."""
    tls: bool = False
    """Certificates are made at the start, and the servers and programs given them: see :meth:`with_security`."""
    policy: Policy | None = None
    namespace: str = "default"
    """Name of the local programs in the policy."""
    client_tls: TlsFiles | None = None
    checkpoint: Checkpoint | None = None
    """When and where the queue is saved; None: it is not."""
    restore_from: str | None = None

    @property
    def uid(self) -> str | None:
        """Identity of the queue; None before :meth:`identified`."""
        return self.controller.uid

    @property
    def secret(self) -> str | None:
        """Secret of the queue's processes; see ``PeerSecurity``."""
        return self.controller.security.secret

    @property
    def needs_secret(self) -> bool:
        """Whether readers need a secret to verify the queue: if they unpickle values, and there is no TLS."""
        return self.allow_pickle and not self.tls

    def identified(self, uid: str, secret: str | None) -> LocalPlan:
        """The plan with identity and secret; see ``ControllerConfig`` and ``PeerSecurity``."""
        security = {"security": self.controller.security.model_copy(update={"secret": secret})}
        own = {"uid": uid, "allow_pickle": self.allow_pickle}
        return replace(
            self,
            controller=self.controller.model_copy(update={**own, **security}),
            units=tuple(unit.model_copy(update=security) for unit in self.units),
        )

    def with_security(self, servers: ServerSecurity, client: TlsFiles) -> LocalPlan:
        """The plan with the files that servers and clients use."""
        update = {"security": servers}
        return replace(
            self,
            controller=self.controller.model_copy(update=update),
            units=tuple(unit.model_copy(update=update) for unit in self.units),
            client_tls=client,
        )

    def with_backend_settings(self, settings: dict[str, Any]) -> LocalPlan:
        """The plan with further settings of the backend, for example the endpoints of a master that was started."""
        choice = self.controller.backend
        return self._on(choice.model_copy(update={"settings": {**choice.settings, **settings}}))

    def with_backend_kind(self, kind: str) -> LocalPlan:
        """The plan with its units on another backend, with that backend's default settings."""
        return self._on(BackendChoice(kind=kind))

    def with_memory_share(self) -> LocalPlan:
        """The plan with units that share half of the free memory of their machine, instead of 1Gi each."""
        share = {"memory_share": MEMORY_SHARE / len(self.units)}
        return replace(self, units=tuple(unit.model_copy(update=share) for unit in self.units))

    def _on(self, backend: BackendChoice) -> LocalPlan:
        update = {"backend": backend}
        return replace(
            self,
            controller=self.controller.model_copy(update=update),
            units=tuple(unit.model_copy(update=update) for unit in self.units),
        )

    def with_folders(self, journal: Path, arenas: Path) -> LocalPlan:
        """The plan with places for what outlives the processes."""
        return replace(
            self,
            controller=self.controller.model_copy(update={"journal": str(journal)}),
            units=tuple(unit.model_copy(update={"directory": str(arenas)}) for unit in self.units),
        )

    def with_arenas_on_disk(self, folder: Path) -> LocalPlan:
        """The plan with the memory of storage units in files below ``folder``, which is not on a tmpfs."""
        update = {"directory": str(folder), "prefault": False, "reserve": True}
        return replace(self, units=tuple(unit.model_copy(update=update) for unit in self.units))

    def controllers(self, ports: Sequence[int]) -> list[ControllerConfig]:
        """The controllers; of several, each listens at its own of ``ports`` and has its share of the rows."""
        if self.shards == 1:
            return [self.controller]
        return shard_configs(self.controller, [f"{HOST}:{port}" for port in ports], ports)

    def unit_configs(self, *controllers: str) -> list[StorageUnitConfig]:
        """The storage units of controllers that serve at ``controllers`` (host:port)."""
        update = {"controller": list(controllers), "shards": list(controllers) if self.shards > 1 else []}
        return [unit.model_copy(update=update) for unit in self.units]

    def attach_config(self, *controllers: str) -> AttachConfig:
        """Return the settings by which programs attach to the queue."""
        return AttachConfig(
            name=self.name,
            uid=self.uid,
            controller=ControllerAddresses(addresses=list(controllers)),
            layout="dense" if self.layout == "dense" else "jagged",
            security=AttachSecurity(allow_pickle=self.allow_pickle, tls=self.client_tls, secret=self.secret),
        )

    @property
    def files(self) -> list[str]:
        """The files that the processes make in the folder of the queue, besides its identity, journal and arenas."""
        controllers = ["controller"] if self.shards == 1 else [f"controller-{shard}" for shard in range(self.shards)]
        servers = [*controllers, *(unit.name for unit in self.units), "checkpoint"]
        kept = [f"{server}.{kind}" for server in servers for kind in ("json", "log")]
        kept += [ATTACH_FILE, TROUBLE_FILE, CHECKPOINT_STATUS, f"{CHECKPOINT_STATUS}.new"]
        kept += [MASTER_LOG] if self.master else []
        kept += [POLICY_FILE] if self.policy else []
        pairs = [f"{TLS_FOLDER}/{side}.{kind}" for side in ("server", "client") for kind in ("pem", "new")]
        return kept + ([f"{TLS_FOLDER}/ca.crt", *pairs] if self.tls else [])

    def checkpoint_config(self, folder: Path, *controllers: str, restore: bool) -> CheckpointConfig | None:
        """Settings of the process that restores the queue, if ``restore``, and saves it; None if it has nothing to do.

        With a policy only the certificate of the servers has all rights.
        """
        saves = self.checkpoint
        if saves is None and not (restore and self.restore_from):
            return None
        attach = self.attach_config(*controllers)
        security = attach.security.model_copy(update={"tls": self.controller.security.tls})
        return CheckpointConfig(
            attach=attach.model_copy(update={"security": security}),
            restore_from=self.restore_from if restore else None,
            units=len(self.units),
            schedule=saves.schedule if saves else None,
            destination=saves.destination if saves else None,
            keep=saves.keep if saves else 1,
            status_file=str(folder / CHECKPOINT_STATUS),
        )


def with_backend(resource: TransferQueue, kind: str) -> TransferQueue:
    """``resource`` with backend ``kind``; its own settings of that kind if it has it, else the defaults.

    Raises ConfigError for a kind that this machine cannot run, and for settings that do not go with it.
    """
    if kind == resource.spec.backend.kind:
        return resource
    backends = {
        "simple": Backend(simple=Simple()),
        "mooncake": Backend(mooncake=Mooncake(protocol="tcp")),
        "yuanrong": Backend(yuanrong=Yuanrong()),
    }
    if kind not in backends:
        supported = ", ".join(f'"{name}"' for name in backends)
        raise ConfigError(f'--backend: Unsupported value: "{kind}": supported values: {supported}')
    # Validated again: some settings apply to some backends only.
    return parse({**_given(resource), "spec": {**_given(resource.spec), "backend": backends[kind]}})


def _given(model: BaseModel) -> dict[str, Any]:
    """Return the fields that were set, by their names in YAML."""
    fields = type(model).model_fields
    return {fields[name].alias or name: getattr(model, name) for name in model.model_fields_set}


def plan_local(resource: TransferQueue) -> LocalPlan:
    """The processes of ``resource``. Storage unit i listens i ports above ``spec.storage.port``.

    Controller i of several listens i ports above ``spec.controller.port``. Raises ConfigError for a backend that has no
    local processes, for what only a cluster has, and for ports of several controllers that others need.
    """
    spec = resource.spec
    if spec.controller.shards > 1:
        _check_ports(spec)
    if spec.storage.replicas == 0:
        raise ConfigError("spec.storage.replicas: 0 storage units hold no rows; on one machine set 1 or more")
    if spec.security.tokens_secret is not None:
        raise ConfigError(
            "spec.security.tokensSecret: there are no Secrets on one machine, whose programs show the certificate that "
            "tq up makes; remove it, and give them their rights in the policy by namespace: "
            f"{resource.metadata.namespace}"
        )
    site = _site(spec)
    for number in range(spec.storage.replicas):
        _check_port("spec.storage.port", spec.storage.port, number)
        _check_port("spec.storage.metricsPort", spec.storage.metrics_port, number)
    return LocalPlan(
        name=resource.metadata.name,
        controller=controller_config(resource.metadata.name, spec, site),
        units=tuple(
            unit_config(f"storage-{number}", spec, site, ["unknown:0"], number)
            for number in range(spec.storage.replicas)
        ),
        master=spec.backend.mooncake.master if spec.backend.mooncake else None,
        layout=spec.layout,
        allow_pickle=spec.security.allow_pickle,
        tls=spec.tls_mode("off") != "off",
        policy=spec.security.policy_document(SERVER_NAME, saves=spec.saves),
        namespace=resource.metadata.namespace,
        shards=spec.controller.shards,
        checkpoint=spec.scheduled,
        restore_from=spec.restore_from,
    )


def _check_ports(spec: Spec) -> None:
    """On one machine the storage units take ports too."""
    controller, storage = spec.controller, spec.storage
    used: dict[int, str] = {}
    for name, first, count in (
        ("spec.controller.port", controller.port, controller.shards),
        ("spec.controller.metricsPort", controller.metrics_port, controller.shards),
        ("spec.storage.port", storage.port, storage.replicas),
        ("spec.storage.metricsPort", storage.metrics_port, storage.replicas),
    ):
        if first + count > 65536:
            raise ConfigError(f"{name}: ports {first} to {first + count - 1} are needed; choose a lower one")
        for port in range(first, first + count):
            if port in used:
                raise ConfigError(f"{name}: port {port} is one of {used[port]} too; choose ports further apart")
            used[port] = name


def _check_port(name: str, first: int, number: int) -> None:
    if first + number > 65535:
        raise ConfigError(f"storage unit {number} would need port {first + number}; choose a lower {name}")


def _site(spec: Spec) -> Site:
    """This machine, for the servers of a queue. Raises ConfigError for a backend without servers here."""
    backend, settings, spill = spec.backend, {}, ""
    if backend.yuanrong is not None:
        settings = {"worker": backend.yuanrong.worker or f"{HOST}:{backend.yuanrong.worker_port}"}
    elif backend.simple is not None:
        spill = _spill_folder(backend.simple.ssd_offload)
    elif backend.mooncake is None:
        raise ConfigError(
            f'spec.backend: "{backend.kind}" has no processes here: its storage units are actors of a Ray cluster, '
            "which transfer_queue.init() starts in a program that called ray.init(); supported values: simple, "
            "mooncake, yuanrong"
        )
    return Site(host=HOST, protocol=spec.transport, backend=settings, spill=spill)


def _spill_folder(offload: SsdOffload | None) -> str:
    if offload is None:
        return ""
    if offload.path is None:
        raise ConfigError("spec.backend.simple.ssdOffload.path: name a folder on a local disk of this machine")
    return str(Path(offload.path).absolute())
