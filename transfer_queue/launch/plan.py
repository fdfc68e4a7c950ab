"""What runs where when a ``TransferQueue`` resource runs on one machine. Pure: settings in, settings out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from transfer_queue.config.attach import AttachConfig, AttachSecurity, ControllerAddresses
from transfer_queue.config.processes import BackendChoice, ControllerConfig, SamplerChoice, StorageUnitConfig
from transfer_queue.config.resource import (
    Backend,
    Master,
    Mooncake,
    Simple,
    Spec,
    SsdOffload,
    TransferQueue,
    Yuanrong,
    parse,
)
from transfer_queue.config.security import Policy, ServerSecurity, TlsFiles
from transfer_queue.config.shards import journal_of, rows_of
from transfer_queue.errors import ConfigError

__all__ = ["HOST", "MEMORY_SHARE", "SERVER_NAME", "LocalPlan", "plan_local", "with_backend"]

HOST = "127.0.0.1"
"""Where the servers listen: nothing of a local queue is reachable from other machines."""
MEMORY_SHARE = 0.5
"""Of the memory that is free on a machine: for the storage units there that have no limit of their own."""
SERVER_NAME = "localhost"
"""A name of the servers' certificate."""


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
    """What the policy knows programs here by."""
    client_tls: TlsFiles | None = None

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
        """The plan with units that share half of the memory that is free on their machine, rather than each 1Gi."""
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
        one = self.controller
        if self.shards == 1:
            return [one]
        addresses = [f"{HOST}:{port}" for port in ports]
        return [
            one.model_copy(
                update={
                    "port": port,
                    "metrics_port": one.metrics_port and one.metrics_port + shard,
                    "sample_capacity": rows_of(one.sample_capacity, shard, self.shards),
                    "journal": one.journal and journal_of(one.journal, shard, self.shards),
                    "shards": addresses,
                    "shard": shard,
                }
            )
            for shard, port in enumerate(ports)
        ]

    def unit_configs(self, *controllers: str) -> list[StorageUnitConfig]:
        """The storage units of controllers that serve at ``controllers`` (host:port)."""
        update = {"controller": list(controllers), "shards": list(controllers) if self.shards > 1 else []}
        return [unit.model_copy(update=update) for unit in self.units]

    def attach_config(self, *controllers: str) -> AttachConfig:
        """What programs need to use the queue."""
        return AttachConfig(
            name=self.name,
            controller=ControllerAddresses(addresses=list(controllers)),
            layout="dense" if self.layout == "dense" else "jagged",
            security=AttachSecurity(allow_pickle=self.allow_pickle, tls=self.client_tls),
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
    # Checked anew, as some settings go with some backends only.
    return parse({**_given(resource), "spec": {**_given(resource.spec), "backend": backends[kind]}})


def _given(model: BaseModel) -> dict[str, Any]:
    """What was set, by the names that YAML has for it."""
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
    if spec.security.tokens_secret is not None:
        raise ConfigError(
            "spec.security.tokensSecret: there are no Secrets on one machine, whose programs show the certificate that "
            "tq up makes; remove it, and give them their rights in the policy by namespace: "
            f"{resource.metadata.namespace}"
        )
    backend = BackendChoice(kind=spec.backend.kind, settings=_backend_settings(spec))
    capacity = int(spec.unit_capacity)
    return LocalPlan(
        name=resource.metadata.name,
        controller=ControllerConfig(
            name=resource.metadata.name,
            host=HOST,
            port=spec.controller.port,
            metrics_port=spec.controller.metrics_port,
            sampler=SamplerChoice(name=spec.controller.sampler.name, args=dict(spec.controller.sampler.args)),
            polling_mode=spec.controller.polling_mode,
            sample_capacity=spec.sample_capacity,
            durability=spec.controller.durability,
            lease_s=spec.controller.lease_seconds,
            backend=backend,
            expected_units=spec.storage.replicas,
        ),
        units=tuple(
            StorageUnitConfig(
                name=f"storage-{number}",
                host=HOST,
                port=_port("spec.storage.port", spec.storage.port, number),
                metrics_port=_port("spec.storage.metricsPort", spec.storage.metrics_port, number),
                controller=["unknown:0"],
                backend=backend,
                capacity=capacity,
                durability=spec.controller.durability,
            )
            for number in range(spec.storage.replicas)
        ),
        master=spec.backend.mooncake.master if spec.backend.mooncake else None,
        layout=spec.layout,
        allow_pickle=spec.security.allow_pickle,
        tls=spec.tls_mode("off") != "off",
        policy=spec.security.policy_document(SERVER_NAME),
        namespace=resource.metadata.namespace,
        shards=spec.controller.shards,
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


def _port(name: str, first: int, number: int) -> int:
    if first + number > 65535:
        raise ConfigError(f"storage unit {number} would need port {first + number}; choose a lower {name}")
    return first + number


def _backend_settings(spec: Spec) -> dict[str, Any]:
    backend = spec.backend
    if backend.simple is not None:
        return _spill_settings(backend.simple.ssd_offload)
    if backend.yuanrong is not None:
        yuanrong = backend.yuanrong
        return {
            "worker": yuanrong.worker or f"{HOST}:{yuanrong.worker_port}",
            "requestTimeout": yuanrong.request_timeout,
        }
    if backend.mooncake is None:
        raise ConfigError(
            f'spec.backend: "{backend.kind}" has no processes here: its storage units are actors of a Ray cluster, '
            "which transfer_queue.init() starts in a program that called ray.init(); supported values: simple, "
            "mooncake, yuanrong"
        )
    settings = backend.mooncake.model_dump(
        mode="json", by_alias=True, include={"device_name", "local_buffer_size", "zero_copy"}
    )
    return {"protocol": spec.transport, **settings}


def _spill_settings(offload: SsdOffload | None) -> dict[str, Any]:
    if offload is None:
        return {}
    if offload.path is None:
        raise ConfigError("spec.backend.simple.ssdOffload.path: name a folder on a local disk of this machine")
    return {
        "ssdOffload": {
            "enabled": True,
            "path": str(Path(offload.path).absolute()),
            "thresholdBytes": int(offload.threshold_bytes),
            "capacity": int(offload.capacity),
        }
    }
