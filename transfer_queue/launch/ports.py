"""Ports of a local queue: the ports of the resource, else the default ports, else other free ports."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from transfer_queue.errors import StartError
from transfer_queue.launch.plan import HOST

if TYPE_CHECKING:
    from transfer_queue.config.resource import TransferQueue

__all__ = ["PortClaims", "with_free_ports"]


class PortClaims:
    """Ports that this process has claimed until it gives them up or ends. Other processes look for other ports.

    A claim is a name that one socket of the network namespace can have, so that it holds among all users, before a
    server listens and while it is restarted. Other systems than Linux have no such names, and no claims.
    """

    def __init__(self) -> None:
        self._claims: dict[int, socket.socket] = {}

    def __enter__(self) -> PortClaims:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up(list(self._claims))

    def claim(self, port: int) -> bool:
        """Whether nobody else has claimed the port or listens there."""
        with contextlib.ExitStack() as undo:
            if sys.platform == "linux":
                mark = undo.enter_context(socket.socket(socket.AF_UNIX))
                try:
                    mark.bind(f"\0transferqueue-port-{port}")
                except OSError:
                    return False
                self._claims[port] = mark
            if free := _is_free(port):
                undo.pop_all()
            else:
                self._claims.pop(port, None)
            return free

    def give_up(self, ports: Iterable[int]) -> None:
        for port in ports:
            if port in self._claims:
                self._claims.pop(port).close()


def with_free_ports(resource: TransferQueue, claims: PortClaims | None = None) -> TransferQueue:
    """Return ``resource`` with free ports where it sets none: the default port of each server, or the next free one.

    They are claimed until ``claims`` are given up; without ``claims`` they are not. Raises StartError if there is none
    up to 65535.
    """
    if claims is None:
        with PortClaims() as temporary:
            return with_free_ports(resource, temporary)
    spec = resource.spec
    wanted: list[tuple[Any, str, int]] = [
        (spec.controller, "port", spec.controller.shards),
        (spec.controller, "metrics_port", spec.controller.shards),
        (spec.storage, "port", spec.storage.replicas),
        (spec.storage, "metrics_port", spec.storage.replicas),
    ]
    mooncake = spec.backend.mooncake
    if mooncake is not None and mooncake.master is not None:
        wanted += [(mooncake.master, "rpc_port", 1), (mooncake.master, "metrics_port", 1)]
    taken: set[int] = set()
    for part, name, count in wanted:
        if name in part.model_fields_set:
            taken.update(range(getattr(part, name), getattr(part, name) + count))
    changed: dict[int, dict[str, int]] = {}
    for part, name, count in wanted:
        if name not in part.model_fields_set:
            port = _free(getattr(part, name), count, taken, claims)
            taken.update(range(port, port + count))
            changed.setdefault(id(part), {})[name] = port

    def renewed(part: Any, **update: Any) -> Any:
        return part.model_copy(update={**changed.get(id(part), {}), **update})

    backend = spec.backend
    if mooncake is not None and mooncake.master is not None:
        backend = renewed(backend, mooncake=renewed(mooncake, master=renewed(mooncake.master)))
    parts = {"controller": renewed(spec.controller), "storage": renewed(spec.storage), "backend": backend}
    return resource.model_copy(update={"spec": renewed(spec, **parts)})


def _free(first: int, count: int, taken: set[int], claims: PortClaims) -> int:
    """The first of ``count`` free ports in a row, from ``first`` on."""
    port = first
    while port + count <= 65536:
        wanted = range(port, port + count)
        used = [each for each in wanted if each in taken or not claims.claim(each)]
        if not used:
            return port
        claims.give_up(each for each in wanted if each not in taken)
        port = used[-1] + 1
    raise StartError(f"no {count} ports in a row are free on {HOST} from {first} on; set other ports in the resource")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT is not "in use"
        try:
            probe.bind((HOST, port))
            probe.listen()
        except OSError:
            return False
    return True
