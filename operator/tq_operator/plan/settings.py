"""The files that controller, storage units and attached clients read, as plain data with the names of the files."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import yaml

from tq_operator.plan.names import controller_name
from tq_operator.plan.queue import Queue
from transfer_queue.config.derive import Site, controller_config, shard_configs, unit_config
from transfer_queue.config.processes import ControllerConfig, StorageUnitConfig
from transfer_queue.config.resource import Checkpoint, Mooncake, TlsMode
from transfer_queue.config.security import ServerSecurity, TlsFiles

__all__ = [
    "ARENA_DIRECTORY",
    "CONFIG_DIRECTORY",
    "JOURNAL_DIRECTORY",
    "SPILL_DIRECTORY",
    "STATE_DIRECTORY",
    "TLS_DIRECTORY",
    "TOKENS_KEY",
    "TOKEN_DIRECTORY",
    "TOKEN_KEY",
    "attach_settings",
    "checkpoint_settings",
    "controller_settings",
    "policy_settings",
    "restarting",
    "storage_settings",
    "yaml_text",
]

CONFIG_DIRECTORY = "/etc/transferqueue"
TLS_DIRECTORY = "/etc/transferqueue-tls"
"""Files ca.crt, tls.crt, tls.key."""
TOKEN_DIRECTORY = "/etc/transferqueue-token"
TOKEN_KEY = "token"
"""In the Secret of a client: its token."""
TOKENS_KEY = "tokens"
"""In the Secret of the servers: lines of ``name token``."""
ARENA_DIRECTORY = "/arena"
JOURNAL_DIRECTORY = "/journal"
SPILL_DIRECTORY = "/spill"
STATE_DIRECTORY = "/state"
"""For the report of the process that saves the queue; it lasts as long as the pod."""
# Any address of the pod, of either family.
_ANY = "0.0.0.0"
_HANDSHAKE = "P2PHANDSHAKE"


def yaml_text(settings: dict[str, Any]) -> str:
    """``settings`` as the text of a file. They are seldom others than at the last look, and YAML takes its time."""
    return _yaml_text(json.dumps(settings))


@lru_cache(maxsize=4096)
def _yaml_text(text: str) -> str:
    return yaml.safe_dump(json.loads(text), sort_keys=False)


def attach_settings(queue: Queue, tls: TlsMode, *, token: bool = False) -> dict[str, Any]:
    """What a client needs to know. ``token``: it shows one, not a certificate."""
    security: dict[str, Any] = {"allowPickle": queue.spec.security.allow_pickle}
    if tls != "off":
        security["tls"] = _tls_files(queue, own=not token)
    if token:
        security["tokenFile"] = f"{TOKEN_DIRECTORY}/{TOKEN_KEY}"
    return {
        "name": queue.name,
        **({"uid": queue.uid} if queue.uid else {}),
        "controller": {"addresses": queue.controller_addresses},
        "layout": queue.spec.layout,
        "security": security,
    }


def checkpoint_settings(queue: Queue) -> dict[str, Any] | None:
    """Settings of the process that restores and saves the queue; None if there is nothing to do.

    It connects with the certificate of the servers.
    """
    saves = queue.spec.scheduled
    if saves is None and not queue.restores:
        return None
    attach = attach_settings(queue, queue.tls)
    return {
        "attach": attach,
        **({"restoreFrom": queue.spec.restore_from, "units": queue.spec.storage.replicas} if queue.restores else {}),
        **({"schedule": saves.schedule, "destination": saves.destination, "keep": saves.keep} if saves else {}),
        "statusFile": f"{STATE_DIRECTORY}/status.json",
        "host": _ANY,
        "metricsPort": (queue.spec.checkpoint or Checkpoint()).metrics_port,
    }


def policy_settings(queue: Queue) -> dict[str, Any] | None:
    """The policy, if there is one. The certificate of the servers has the name of the controller."""
    policy = queue.spec.security.policy_document(queue.host("controller"), saves=queue.spec.saves)
    return None if policy is None else policy.dump()


def _tls_files(queue: Queue, *, own: bool = True) -> dict[str, str]:
    """Clients reach storage units by the addresses of their pods, which no certificate can name beforehand."""
    files = {"certificate": f"{TLS_DIRECTORY}/tls.crt", "key": f"{TLS_DIRECTORY}/tls.key"}
    return {"ca": f"{TLS_DIRECTORY}/ca.crt", **(files if own else {}), "serverName": queue.host("controller")}


def _server_security(queue: Queue) -> ServerSecurity | None:
    if queue.tls == "off":
        return None
    spec = queue.spec.security
    tokens = {} if spec.tokens_secret is None else {"tokens_file": f"{TOKEN_DIRECTORY}/{TOKENS_KEY}"}
    policy = {} if spec.policy is None else {"policy_file": f"{CONFIG_DIRECTORY}/policy.yaml"}
    return ServerSecurity(tls=TlsFiles.model_validate(_tls_files(queue)), **tokens, **policy)


def controller_settings(queue: Queue, *, ipv6: bool = False) -> dict[str, dict[str, Any]]:
    """By the names of the controllers' containers. ``ipv6``: pods have IPv6 addresses first."""
    ports = [queue.spec.controller.port + shard for shard in range(queue.shards)]
    configs = shard_configs(
        controller_config(queue.name, queue.spec, _site(queue, ipv6)), queue.controller_addresses, ports
    )
    return {controller_name(shard, queue.shards): _dump(config) for shard, config in enumerate(configs)}


def restarting(settings: dict[str, Any]) -> str:
    """The settings of a process whose change restarts it. A running controller reloads the number of units; a restore
    happens once."""
    kept = ("expectedUnits", "restoreFrom", "units")
    return yaml_text({name: value for name, value in settings.items() if name not in kept})


def storage_settings(queue: Queue, *, ipv6: bool = False) -> dict[str, Any]:
    """One file for all pods of the StatefulSet; the kubelet tells each its own name and address."""
    return _dump(unit_config("$(POD_NAME)", queue.spec, _site(queue, ipv6), queue.controller_addresses))


def _dump(config: ControllerConfig | StorageUnitConfig) -> dict[str, Any]:
    """Leave out settings that the resource does not set: servers of other versions read these files too."""
    return config.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)


def _site(queue: Queue, ipv6: bool) -> Site:
    simple = queue.spec.backend.simple
    return Site(
        host=_ANY,
        uid=queue.uid or None,
        protocol=queue.transport,
        backend=_place_of_backend(queue, ipv6),
        controller_host=queue.host("controller"),
        unit_host="$(POD_IP)",
        journal=JOURNAL_DIRECTORY,
        arenas=ARENA_DIRECTORY,
        spill=(simple and simple.ssd_offload and simple.ssd_offload.path) or SPILL_DIRECTORY,
        security=_server_security(queue),
    )


def _place_of_backend(queue: Queue, ipv6: bool) -> dict[str, Any]:
    """Where both sides of the backend find its servers."""
    backend = queue.spec.backend
    if backend.mooncake:
        return {**_master_settings(queue, backend.mooncake, ipv6), "evictionDisabled": True}
    if backend.yuanrong and backend.yuanrong.worker:
        # Without a worker of all pods each finds that of its node in its environment.
        return {"worker": backend.yuanrong.worker}
    return {}


def _master_settings(queue: Queue, mooncake: Mooncake, ipv6: bool) -> dict[str, Any]:
    master, group = mooncake.master, mooncake.high_availability
    if group is None:
        host = queue.host("mooncake-master")
        return {
            # The master's own metadata server knows IPv4 alone; without it peers ask each other.
            "metadataServer": _HANDSHAKE if ipv6 else f"http://{host}:{master.http_metadata_port}/metadata",
            "masterServerAddress": f"{host}:{master.rpc_port}",
            "adminAddress": f"{host}:{master.metrics_port}",
        }
    etcd, name = f"etcd://{';'.join(queue.etcd_members)}", queue.child("mooncake-masters")
    pods = [f"{name}-{number}.{queue.host('mooncake-masters')}" for number in range(group.masters)]
    return {
        "metadataServer": etcd,
        "masterServerAddress": etcd,
        "clusterId": queue.cluster_id,
        "adminAddress": ";".join(f"{pod}:{master.metrics_port}" for pod in pods),
    }
