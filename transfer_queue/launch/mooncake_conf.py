"""The section ``backend.MooncakeStore`` of ``init(conf)`` as settings of the backend, with or without a master."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import replace
from typing import Any

import psutil

from transfer_queue.config import defaults
from transfer_queue.config.resource import Master
from transfer_queue.errors import ConfigError
from transfer_queue.launch.plan import LocalPlan

__all__ = ["with_mooncake"]

_SECTION = "backend.MooncakeStore"
_IP = (socket.AF_INET, socket.AF_INET6)


def with_mooncake(plan: LocalPlan, section: Any, *, in_ray: bool) -> LocalPlan:
    """The plan on Mooncake. ``auto_init`` starts a master, on this machine or in the Ray cluster.

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
    address, metadata = section.master_server_address, str(section.metadata_server or "")
    master = Master.model_construct(
        rpc_port=_port("master_server_address", address, anywhere=in_ray),
        http_metadata_port=0 if in_ray else _metadata_port(metadata),
        metrics_port=0,
        rpc_interface=defaults.MASTER_RPC_INTERFACE,
    )
    return replace(plan.with_backend_settings(settings), master=master)


def _is_handshake(value: str) -> bool:
    return value.upper() == "P2PHANDSHAKE"


def _metadata_server(value: str) -> str:
    """Return the address in the engine's form: ``config.yaml`` has HOST:PORT."""
    if _is_handshake(value):
        return "P2PHANDSHAKE"
    return value if "://" in value else f"http://{_given('metadata_server', value)}/metadata"


def _metadata_port(value: str) -> int:
    if _is_handshake(value):
        return 0
    return _port("metadata_server", value.removeprefix("http://").partition("/")[0])


def _given(name: str, value: object) -> str:
    if not value:
        raise ConfigError(f"{_SECTION}.{name}: name the server as HOST:PORT, or let init() start one with auto_init")
    return str(value)


def _port(name: str, value: object, *, anywhere: bool = False) -> int:
    """``anywhere``: the master runs beside the controller, and the named host is ignored."""
    host, _, port = _given(name, value).rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{_SECTION}.{name}: {value!r} is not HOST:PORT")
    if not anywhere and not _is_local(host.strip("[]")):
        raise ConfigError(
            f"{_SECTION}.{name}: {value!r} is on another machine, or no address to connect to. init() starts a master "
            "on this machine alone: name one of its addresses, or set auto_init to false to use a master elsewhere"
        )
    return int(port)


def _is_local(host: str) -> bool:
    """Whether it is a name or an address of this machine."""
    if host in ("", "localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # A bind proves nothing: with net.ipv4.ip_nonlocal_bind the kernel allows every address.
    found = (entry.address for entries in psutil.net_if_addrs().values() for entry in entries if entry.family in _IP)
    return address.is_loopback or any(ipaddress.ip_address(each) == address for each in found)
