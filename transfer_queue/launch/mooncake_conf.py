"""The section ``backend.MooncakeStore`` of ``init(conf)`` as settings of the backend, with or without a master."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import replace
from typing import Any

from transfer_queue.config import defaults
from transfer_queue.config.resource import Master
from transfer_queue.errors import ConfigError
from transfer_queue.launch.plan import LocalPlan

__all__ = ["with_mooncake"]

_SECTION = "backend.MooncakeStore"


def with_mooncake(plan: LocalPlan, section: Any, *, in_ray: bool) -> LocalPlan:
    """The plan on Mooncake. ``auto_init``: with a master of its own on this machine.

    Raises ConfigError naming the setting.
    """
    settings: dict[str, Any] = {"protocol": str(section.protocol), "localBufferSize": section.local_buffer_size}
    if section.device_name:
        settings["deviceName"] = str(section.device_name)
    if not section.auto_init:
        endpoints = {
            "metadataServer": _metadata_server(str(section.metadata_server or "")),
            "masterServerAddress": _given("master_server_address", section.master_server_address),
        }
        return plan.with_backend_settings({**settings, **endpoints})
    if in_ray:
        raise ConfigError(
            f"{_SECTION}.auto_init: a master for a Ray cluster is not started by init(); start mooncake_master where "
            "all nodes reach it, name it in metadata_server and master_server_address, and set auto_init to false"
        )
    master = Master.model_construct(
        rpc_port=_local_port("master_server_address", section.master_server_address),
        http_metadata_port=_metadata_port(str(section.metadata_server or "")),
        metrics_port=0,
        rpc_interface=defaults.MASTER_RPC_INTERFACE,
    )
    return replace(plan.with_backend_settings(settings), master=master)


def _is_handshake(value: str) -> bool:
    return value.upper() == "P2PHANDSHAKE"


def _metadata_server(value: str) -> str:
    """As the engine takes it: ``config.yaml`` has HOST:PORT."""
    if _is_handshake(value):
        return "P2PHANDSHAKE"
    return value if "://" in value else f"http://{_given('metadata_server', value)}/metadata"


def _metadata_port(value: str) -> int:
    if _is_handshake(value):
        return 0
    return _local_port("metadata_server", value.removeprefix("http://").partition("/")[0])


def _given(name: str, value: object) -> str:
    if not value:
        raise ConfigError(f"{_SECTION}.{name}: name the server as HOST:PORT, or let init() start one with auto_init")
    return str(value)


def _local_port(name: str, value: object) -> int:
    host, _, port = _given(name, value).rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{_SECTION}.{name}: {value!r} is not HOST:PORT")
    if not _is_local(host.strip("[]")):
        raise ConfigError(
            f"{_SECTION}.{name}: {value!r} is on another machine, where init() starts nothing; set auto_init to false "
            "to use a master that runs there"
        )
    return int(port)


def _is_local(host: str) -> bool:
    if host in ("", "localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
