"""Engines of a queue on one machine take connections from this machine only.

The engine listens on all addresses and has no setting to change it, so its sockets are bound to the loopback interface
as soon as they exist. Since Linux 5.7 this needs no privilege.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["can_confine", "confined", "is_loopback"]

_LOOPBACK = b"lo\0"
_PORTS = (15000, 17000)
"""The engine's own range, unless ``MC_MIN_PRC_PORT`` and ``MC_MAX_PRC_PORT`` say otherwise."""


def is_loopback(host: str) -> bool:
    """Return whether ``host`` (a name or an address) is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def can_confine() -> bool:
    """Return whether this kernel lets a program without privileges bind a socket to an interface."""
    with socket.socket() as probe:
        return _tie(probe)


@contextmanager
def confined(*, wanted: bool = True) -> Iterator[None]:
    """Bind the sockets on which the engine starts to listen in the ``with`` block to the loopback interface.

    Connections that other machines have already made are closed. Sockets of the program itself do not change, because
    they are outside the engine's range of ports.
    """
    before = {number for number, _ in _listeners()} if wanted else set()
    yield
    if not wanted:
        return
    ports = set()
    for number, listener in _listeners():
        if number not in before:
            ports.add(listener.getsockname()[1])
            _tie(listener)
    for connection in _sockets():
        with suppress(OSError):  # not connected, or not an internet socket
            port, peer = connection.getsockname()[1], connection.getpeername()[0]
            if port in ports and not is_loopback(str(peer).removeprefix("::ffff:")):
                connection.shutdown(socket.SHUT_RDWR)


def _tie(listener: socket.socket) -> bool:
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK)
    except PermissionError:
        return False
    return True


def _listeners() -> Iterator[tuple[int, socket.socket]]:
    """(inode, socket) of each socket that listens on all addresses at a port of the engine's range."""
    names = (("MC_MIN_RPC_PORT", "MC_MIN_PRC_PORT"), ("MC_MAX_RPC_PORT", "MC_MAX_PRC_PORT"))
    least, most = (
        int(next(filter(None, map(os.environ.get, each)), default)) for each, default in zip(names, _PORTS, strict=True)
    )
    for one in _sockets():
        if one.type != socket.SOCK_STREAM or not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            continue
        address = one.getsockname()
        if address[0] in ("0.0.0.0", "::") and least <= address[1] <= most:
            yield os.fstat(one.fileno()).st_ino, one


def _sockets() -> Iterator[socket.socket]:
    """The internet sockets of this process. Each descriptor is valid until the next iteration."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    yield one
