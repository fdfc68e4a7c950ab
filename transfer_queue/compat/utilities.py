"""Helpers that programs import from ``transfer_queue.utils`` of 0.1.x."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any, cast, overload

from transfer_queue.compat.server_info import ZMQServerInfo
from transfer_queue.config.attach import join_address
from transfer_queue.errors import InvalidInputError, InvalidTypeError

__all__ = [
    "format_zmq_address",
    "get_env_bool",
    "get_free_port",
    "get_logger",
    "get_node_ip_address",
    "is_ipv6_address",
    "limit_pytorch_auto_parallel_threads",
    "process_zmq_server_info",
]


@overload
def process_zmq_server_info(handlers: Mapping[Any, Any]) -> dict[Any, ZMQServerInfo]: ...
@overload
def process_zmq_server_info(handlers: Any) -> ZMQServerInfo: ...
def process_zmq_server_info(handlers: Any) -> ZMQServerInfo | dict[Any, ZMQServerInfo]:
    """The address of a server, or of each of several by the same names.

    A handle is an object with ``get_zmq_server_info()``: a Ray actor's handle or an object of this process. Raises
    InvalidTypeError for others.
    """
    if isinstance(handlers, Mapping):
        return {name: _info_of(handle) for name, handle in handlers.items()}
    return _info_of(handlers)


def _info_of(handle: Any) -> ZMQServerInfo:
    method = getattr(handle, "get_zmq_server_info", None)
    if method is None:
        raise InvalidTypeError(f"handlers: {type(handle).__name__} has no get_zmq_server_info")
    if not hasattr(method, "remote"):
        return cast("ZMQServerInfo", method())
    import ray

    return cast("ZMQServerInfo", ray.get(method.remote()))


def get_node_ip_address() -> str:
    """The address by which other nodes reach this one: the source address of its default route, else loopback."""
    for family, probe in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probing:
            probing.connect((probe, 9))  # sends nothing
            return str(probing.getsockname()[0])
    return "127.0.0.1"


def get_free_port(ip: str = "127.0.0.1") -> int:
    """A TCP port of ``ip`` that was free a moment ago. Raises InvalidInputError for an address of another host."""
    with socket.socket(socket.AF_INET6 if is_ipv6_address(ip) else socket.AF_INET) as probing:
        try:
            probing.bind((ip, 0))
        except OSError as error:
            raise InvalidInputError(f"ip {ip!r} is no address of this host: {error.strerror}") from None
        return int(probing.getsockname()[1])


def format_zmq_address(ip: str, port: int) -> str:
    """``tcp://ip:port``, with an IPv6 address in brackets."""
    return f"tcp://{join_address(ip, port)}"


def is_ipv6_address(ip: str) -> bool:
    """Whether ``ip`` is an IPv6 address; False for host names."""
    try:
        return ipaddress.ip_address(ip).version == 6
    except ValueError:
        return False


def get_env_bool(env_key: str, default: bool = False) -> bool:
    """Whether an environment variable is 1, true, yes, y or on, in upper or lower case."""
    text = os.environ.get(env_key)
    return default if text is None else text.strip().lower() in ("1", "true", "yes", "y", "on")


@contextlib.contextmanager
def limit_pytorch_auto_parallel_threads(target_num_threads: int | None = None, info: str = "") -> Iterator[None]:
    """Let torch use at most this many threads inside the block; default: ``TQ_NUM_THREADS``, else 8."""
    import torch

    target = int(os.environ.get("TQ_NUM_THREADS", "8")) if target_num_threads is None else target_num_threads
    if target < 1:
        raise InvalidInputError(f"target_num_threads must be at least 1, not {target}")
    before = torch.get_num_threads()
    torch.set_num_threads(min(target, before))
    get_logger(__name__).debug("torch uses %d threads for %s", torch.get_num_threads(), info or "a block")
    try:
        yield
    finally:
        torch.set_num_threads(before)


def get_logger(name: str | None = None, default_level: str = "WARNING") -> logging.Logger:
    """The logger ``name`` at the level that ``TQ_LOGGING_LEVEL`` names, else at ``default_level``."""
    logger = logging.getLogger(name)
    level = os.environ.get("TQ_LOGGING_LEVEL", default_level).upper()
    logger.setLevel(level if isinstance(logging.getLevelName(level), int) else logging.WARNING)
    return logger
