"""Settings of a queue's processes from its resource: one mapping, for one machine and for a cluster. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transfer_queue.config.processes import BackendChoice, ControllerConfig, SamplerChoice, StorageUnitConfig
from transfer_queue.config.resource import Mooncake, Spec, SsdOffload
from transfer_queue.config.security import ServerSecurity

__all__ = ["Site", "controller_config", "shard_configs", "unit_config"]


@dataclass(frozen=True)
class Site:
    """Settings that a resource does not hold: where its processes run and how they reach each other.

    Attributes:
        host: Address that every server listens on.
        protocol: Protocol of Mooncake's transfers: "tcp" or "rdma".
        backend: Settings of the backend that depend on the place, such as the addresses of a master or worker.
        controller_host: Host name of the controllers for others; None: ``host``.
        unit_host: Host name of a storage unit for others; None: ``host``.
        journal: Folder of the journals; used if the queue is durable.
        arenas: Folder of the arenas; None: the default.
        spill: Folder of the blocks that spill to disk; used if the backend spills.
        security: Files of the servers.
        uid: Identity of the queue.
    """

    host: str
    protocol: str
    backend: Mapping[str, Any] = field(default_factory=dict)
    controller_host: str | None = None
    unit_host: str | None = None
    journal: str | None = None
    arenas: str | None = None
    spill: str = ""
    security: ServerSecurity | None = None
    uid: str | None = None


def controller_config(name: str, spec: Spec, site: Site) -> ControllerConfig:
    """Settings of a single controller; :func:`shard_configs` derives the settings of several from them."""
    controller = spec.controller
    durable = controller.durability != "none"
    return ControllerConfig(
        name=name,
        host=site.host,
        port=controller.port,
        metrics_port=controller.metrics_port,
        sampler=SamplerChoice(name=controller.sampler.name, args=dict(controller.sampler.args)),
        polling_mode=controller.polling_mode,
        sample_capacity=spec.sample_capacity,
        lease_s=controller.lease_seconds,
        durability=controller.durability,
        backend=_backend(spec, site),
        # Units of the backend ray are actors of programs, which start any number of them.
        expected_units=0 if spec.backend.kind == "ray" else spec.storage.replicas,
        **_given(
            advertise_host=site.controller_host,
            journal=site.journal if durable else None,
            security=site.security,
            uid=site.uid,
            allow_pickle=spec.security.allow_pickle or None,
        ),
    )


def shard_configs(one: ControllerConfig, addresses: Sequence[str], ports: Sequence[int]) -> list[ControllerConfig]:
    """Settings of the controllers at ``addresses`` (host:port), which listen at ``ports``: each has its share of rows.

    Args:
        one: Settings of a single controller.
        addresses: Where each controller is reached.
        ports: Where each controller listens.
    """
    count = len(ports)
    if count == 1:
        return [one]
    return [
        one.model_copy(
            update={
                "port": port,
                "metrics_port": one.metrics_port and one.metrics_port + shard,
                "sample_capacity": _rows_of(one.sample_capacity, shard, count),
                "journal": one.journal and _journal_of(one.journal, shard, count),
                "shards": list(addresses),
                "shard": shard,
            }
        )
        for shard, port in enumerate(ports)
    ]


def unit_config(name: str, spec: Spec, site: Site, controllers: Sequence[str], number: int = 0) -> StorageUnitConfig:
    """Settings of a storage unit.

    Args:
        name: Name of the unit.
        spec: Spec of the resource.
        site: Place where the unit runs.
        controllers: host:port of each controller.
        number: Its number among units that share an address, and so a range of ports.
    """
    storage = spec.storage
    kept = spec.backend.simple is not None  # the other backends hold no arena of their own
    return StorageUnitConfig(
        name=name,
        host=site.host,
        port=storage.port + number,
        metrics_port=storage.metrics_port + number,
        controller=list(controllers),
        shards=list(controllers) if spec.controller.shards > 1 else [],
        backend=_backend(spec, site),
        capacity=int(spec.unit_capacity),
        durability=spec.controller.durability if kept else "none",
        **_given(advertise_host=site.unit_host, directory=site.arenas if kept else None, security=site.security),
    )


def _given(**settings: Any) -> dict[str, Any]:
    """Settings that are None keep their defaults, and are not written into files."""
    return {name: value for name, value in settings.items() if value is not None}


def _backend(spec: Spec, site: Site) -> BackendChoice:
    backend = spec.backend
    settings: dict[str, Any] = dict(site.backend)
    if backend.mooncake is not None:
        settings |= _mooncake(backend.mooncake, site.protocol)
    elif backend.yuanrong is not None:
        settings["requestTimeout"] = backend.yuanrong.request_timeout
    elif backend.simple is not None and backend.simple.ssd_offload is not None:
        settings["ssdOffload"] = _spill(backend.simple.ssd_offload, site.spill)
    return BackendChoice(kind=backend.kind, settings=settings)


def _mooncake(mooncake: Mooncake, protocol: str) -> dict[str, Any]:
    return {
        "protocol": protocol,
        **mooncake.model_dump(mode="json", by_alias=True, include={"device_name", "local_buffer_size", "zero_copy"}),
    }


def _spill(offload: SsdOffload, path: str) -> dict[str, Any]:
    return {
        "enabled": True,
        "path": path,
        "thresholdBytes": int(offload.threshold_bytes),
        "capacity": int(offload.capacity),
    }


def _rows_of(rows: int | None, shard: int, shards: int) -> int | None:
    """The part of ``rows`` that one of so many shards may have; None is unlimited."""
    if rows is None:
        return None
    part, rest = divmod(rows, shards)
    return part + (shard < rest)


def _journal_of(folder: str, shard: int, shards: int) -> str:
    """The folder of a shard's journal in that of the queue. It names their number: with another number of shards
    partitions would be looked for where they are not."""
    return folder if shards == 1 else f"{folder}/{shard}-of-{shards}"
