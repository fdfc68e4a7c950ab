"""The files that controller, storage units and attached clients read, as plain data with the names of the files."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import yaml

from tq_operator.plan.names import controller_name
from tq_operator.plan.queue import Queue
from transfer_queue.config.resource import Mooncake, TlsMode
from transfer_queue.config.shards import journal_of, rows_of

__all__ = [
    "ARENA_DIRECTORY",
    "CONFIG_DIRECTORY",
    "JOURNAL_DIRECTORY",
    "SPILL_DIRECTORY",
    "TLS_DIRECTORY",
    "TOKENS_KEY",
    "TOKEN_DIRECTORY",
    "TOKEN_KEY",
    "attach_settings",
    "controller_settings",
    "policy_settings",
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
# Any address of the pod, over IPv4.
_ANY = "0.0.0.0"


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
        "controller": {"addresses": queue.controller_addresses},
        "layout": queue.spec.layout,
        "security": security,
    }


def policy_settings(queue: Queue) -> dict[str, Any] | None:
    """The policy, if there is one. The certificate of the servers has the name of the controller."""
    policy = queue.spec.security.policy_document(queue.host("controller"))
    return None if policy is None else policy.dump()


def _tls_files(queue: Queue, *, own: bool = True) -> dict[str, str]:
    """Clients reach storage units by the addresses of their pods, which no certificate can name beforehand."""
    files = {"certificate": f"{TLS_DIRECTORY}/tls.crt", "key": f"{TLS_DIRECTORY}/tls.key"}
    return {"ca": f"{TLS_DIRECTORY}/ca.crt", **(files if own else {}), "serverName": queue.host("controller")}


def _server_security(queue: Queue) -> dict[str, Any]:
    if queue.tls == "off":
        return {}
    security: dict[str, Any] = {"tls": _tls_files(queue)}
    if queue.spec.security.tokens_secret is not None:
        security["tokensFile"] = f"{TOKEN_DIRECTORY}/{TOKENS_KEY}"
    if queue.spec.security.policy is not None:
        security["policyFile"] = f"{CONFIG_DIRECTORY}/policy.yaml"
    return {"security": security}


def controller_settings(queue: Queue) -> dict[str, dict[str, Any]]:
    """By the names of the controllers' containers."""
    shards = queue.shards
    return {controller_name(shard, shards): _controller_settings(queue, shard) for shard in range(shards)}


def _controller_settings(queue: Queue, shard: int) -> dict[str, Any]:
    controller, shards = queue.spec.controller, queue.shards
    return {
        "name": queue.name,
        "host": _ANY,
        "port": controller.port + shard,
        "advertiseHost": queue.host("controller"),
        "metricsPort": queue.metrics_ports[shard],
        "sampler": {"name": controller.sampler.name, "args": controller.sampler.args},
        "pollingMode": controller.polling_mode,
        "sampleCapacity": rows_of(queue.spec.sample_capacity, shard, shards),
        "backend": {"kind": queue.spec.backend.kind, "settings": _backend_settings(queue)},
        **({"leaseS": controller.lease_seconds} if controller.lease_seconds else {}),
        **(
            {"durability": controller.durability, "journal": journal_of(JOURNAL_DIRECTORY, shard, shards)}
            if controller.durability != "none"
            else {}
        ),
        **({"shards": queue.controller_addresses, "shard": shard} if shards > 1 else {}),
        **_server_security(queue),
    }


def storage_settings(queue: Queue) -> dict[str, Any]:
    """One file for all pods of the StatefulSet; the kubelet tells each its own name and address."""
    storage = queue.spec.storage
    return {
        "name": "$(POD_NAME)",
        "host": _ANY,
        "port": storage.port,
        "advertiseHost": "$(POD_IP)",
        "metricsPort": storage.metrics_port,
        "controller": queue.controller_addresses,
        **({"shards": queue.controller_addresses} if queue.shards > 1 else {}),
        "backend": {"kind": queue.spec.backend.kind, "settings": _backend_settings(queue)},
        "capacity": str(queue.spec.unit_capacity),
        **(_arena_settings(queue) if queue.spec.backend.simple else {}),
        **_server_security(queue),
    }


def _arena_settings(queue: Queue) -> dict[str, Any]:
    durability = queue.spec.controller.durability
    return {"directory": ARENA_DIRECTORY, **({"durability": durability} if durability != "none" else {})}


def _backend_settings(queue: Queue) -> dict[str, Any]:
    """What both sides of the backend are told."""
    backend = queue.spec.backend
    if backend.mooncake:
        return _mooncake_settings(queue, backend.mooncake)
    if backend.yuanrong:
        # Without a worker of all pods each finds that of its node in its environment.
        worker = {"worker": backend.yuanrong.worker} if backend.yuanrong.worker else {}
        return {**worker, "requestTimeout": backend.yuanrong.request_timeout}
    if backend.simple and backend.simple.ssd_offload:
        offload = backend.simple.ssd_offload
        return {
            "ssdOffload": {
                "enabled": True,
                "path": offload.path or SPILL_DIRECTORY,
                "thresholdBytes": str(offload.threshold_bytes),
                "capacity": str(offload.capacity),
            }
        }
    return {}


def _mooncake_settings(queue: Queue, mooncake: Mooncake) -> dict[str, Any]:
    buffers = mooncake.zero_copy
    return {
        **_master_settings(queue, mooncake),
        "protocol": queue.transport,
        "deviceName": mooncake.device_name,
        "localBufferSize": str(mooncake.local_buffer_size),
        "zeroCopy": {
            "enable": buffers.enable,
            "tensorBufferSize": str(buffers.tensor_buffer_size),
            "bytesBufferSize": str(buffers.bytes_buffer_size),
            "controllerTensorBufferSize": str(buffers.controller_tensor_buffer_size),
            "controllerBytesBufferSize": str(buffers.controller_bytes_buffer_size),
        },
        "evictionDisabled": True,
    }


def _master_settings(queue: Queue, mooncake: Mooncake) -> dict[str, Any]:
    master, group = mooncake.master, mooncake.high_availability
    if group is None:
        host = queue.host("mooncake-master")
        return {
            "metadataServer": f"http://{host}:{master.http_metadata_port}/metadata",
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
