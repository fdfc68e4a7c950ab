"""Limits for connections that are not authenticated yet, and a count of refused connections.

A *stranger* is a connection that is not admitted yet. The number of strangers is bounded, per address and in total, and
so is their time. If there are too many, the oldest is closed, so that a new one is always accepted: a client sends its
credentials at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import ipaddress
import logging
import resource
import socket
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

__all__ = ["REASONS", "Gate", "Refusals", "Stranger", "printable"]

log = logging.getLogger(__name__)

REASONS = ("credentials", "tls", "malformed", "late", "crowd")
"""Reasons of refusal: a token, certificate or policy; a failed TLS handshake; bytes that are not the protocol; no
complete Hello in time; too many unauthenticated connections."""
_ANY = ("0.0.0.0", "::")
_BATCH = 64
"""Connections accepted in one turn of the loop. Their data is read before more are accepted."""
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RETRY_S = 0.2
_LINES, _LINES_S = 10, 10.0
_MANY_GONE, _TRIM_S, _TRIM_SHARE = 64, 0.5, 0.01
"""After so many strangers have left, free memory returns to the system, once in so many seconds, and in at most this
share of the time, as a large heap takes long: buffers of TLS lie between others, so that the allocator keeps pages, and
needs new ones for the next strangers."""


def printable(text: str, most: int = 300) -> str:
    """Escape ``text`` of a peer for logs: one line of ASCII, cut to ``most`` characters."""
    return ascii(text[:most])[1:-1]


class Refusals:
    """Counts refused connections by reason, and logs them: at most 10 lines in 10 seconds."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(REASONS, 0)
        self._since = 0.0
        self._lines = 0
        self._unlogged = 0

    def note(self, reason: str, address: str, why: str) -> None:
        """Count a refusal. ``reason``: one of ``REASONS``. ``address``: address of the peer."""
        self.counts[reason] += 1
        now = monotonic()
        if now - self._since > _LINES_S:
            self._since, self._lines = now, 0
        self._lines += 1
        if self._lines > _LINES:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more were turned away before)" if self._unlogged else ""
        self._unlogged = 0
        log.warning("turned away %s (%s): %s%s", printable(address), reason, printable(why), more)


class Stranger:
    """A connection that is not admitted yet. ``drop`` ends it, and may be replaced as the handshake advances."""

    __slots__ = ("address", "drop", "group", "left", "timer")

    def __init__(self, address: str, group: str) -> None:
        self.address = address
        """host:port, for logs."""
        self.group = group
        """Key of the limit per address."""
        self.left = False
        self.drop: Callable[[str], None] = _nothing
        self.timer: asyncio.TimerHandle | None = None


class Gate:
    """Accepts the connections of one port. ``opened(socket, stranger)`` serves each. It is a stranger until it ends or
    ``leave`` is called."""

    def __init__(
        self,
        opened: Callable[[socket.socket, Stranger], Coroutine[Any, Any, None]],
        refusals: Refusals,
        *,
        patience_s: float,
        per_address: int,
        total: int,
    ) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._opened = opened
        self._refusals = refusals
        self._patience_s = patience_s
        self._total = max(2, min(total, soft // 4))
        self._per_address = max(1, min(per_address, self._total // 2))
        self._groups: dict[str, dict[Stranger, None]] = {}
        self._strangers = 0
        self._gone = 0
        self._trimming: asyncio.TimerHandle | None = None
        self._trim_after_s = _TRIM_S
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: list[socket.socket] = []
        self._loop = asyncio.get_running_loop()

    def listen(self, host: str, port: int) -> int:
        """Listen on ``host`` and return the port. Raises OSError.

        Empty, ``0.0.0.0`` and ``::`` are all addresses of the families that there are: a pod of an IPv6 cluster has no
        other, one of a cluster with both may be called by either.
        """
        self._listening = _listeners("" if host in _ANY else host, port)
        for listener in self._listening:
            self._loop.add_reader(listener, self._accept, listener)
        return int(self._listening[0].getsockname()[1])

    def descriptors(self) -> list[int]:
        """Sockets that listen."""
        return [listener.fileno() for listener in self._listening]

    def close(self) -> None:
        """Stop listening and drop all strangers. Idempotent."""
        for listener in self._listening:
            self._loop.remove_reader(listener)
            listener.close()
        self._listening = []
        if self._trimming is not None:
            self._trimming.cancel()
        for stranger in [stranger for group in self._groups.values() for stranger in group]:
            self._drop(stranger, "this process ends")
        for task in list(self._tasks):
            task.cancel()

    def leave(self, stranger: Stranger) -> None:
        """Remove a stranger that ended or was admitted. Idempotent."""
        if stranger.left:
            return
        stranger.left = True
        stranger.drop = _nothing
        if stranger.timer is not None:
            stranger.timer.cancel()
        group = self._groups[stranger.group]
        del group[stranger]
        if not group:
            del self._groups[stranger.group]
        self._strangers -= 1
        self._gone += 1
        if self._gone >= _MANY_GONE and self._trimming is None:
            self._trimming = self._loop.call_later(self._trim_after_s, self._trim)

    # ------------------------------------------------------------------------------------------------------ internals

    def _trim(self) -> None:
        self._gone, self._trimming = 0, None
        if _malloc_trim is not None:
            began = monotonic()
            _malloc_trim(0)
            self._trim_after_s = max(_TRIM_S, (monotonic() - began) / _TRIM_SHARE)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_BATCH):
            try:
                accepted, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._wait_for_room(listener, error)
                return
            self._enter(accepted, address)

    def _wait_for_room(self, listener: socket.socket, error: OSError) -> None:
        log.warning("cannot accept a connection: %s; allow this process more open files", error.strerror)
        if self._groups:
            self._crowd_out(self._largest())
        self._loop.remove_reader(listener)
        self._loop.call_later(_RETRY_S, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listening:
            self._loop.add_reader(listener, self._accept, listener)

    def _enter(self, accepted: socket.socket, address: Any) -> None:
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, port = address[:2]
        stranger = Stranger(f"{host}:{port}" if ":" not in host else f"[{host}]:{port}", _group_of(host))
        if len(self._groups.get(stranger.group, ())) >= self._per_address:
            self._crowd_out(stranger.group)
        elif self._strangers >= self._total:
            self._crowd_out(self._largest())
        self._groups.setdefault(stranger.group, {})[stranger] = None
        self._strangers += 1
        stranger.timer = self._loop.call_later(self._patience_s, self._late, stranger)
        begun = False

        async def serve() -> None:
            nonlocal begun
            begun = True
            await self._opened(accepted, stranger)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not begun:
                accepted.close()
                self.leave(stranger)
            elif not task.cancelled() and (error := task.exception()) is not None:
                self._loop.call_exception_handler({"message": "a connection failed", "exception": error})

        task = self._loop.create_task(serve())
        stranger.drop = lambda reason: _cancel(task)
        self._tasks.add(task)
        task.add_done_callback(done)

    def _largest(self) -> str:
        return max(self._groups, key=lambda name: len(self._groups[name]))

    def _crowd_out(self, group: str) -> None:
        oldest = next(iter(self._groups[group]))
        self._refusals.note("crowd", oldest.address, "too many connections have not said who they are; the oldest goes")
        self._drop(oldest, "too many connections have not said who they are")

    def _late(self, stranger: Stranger) -> None:
        why = f"it did not say within {self._patience_s:g} s who it is"
        self._refusals.note("late", stranger.address, why)
        self._drop(stranger, why)

    def _drop(self, stranger: Stranger, reason: str) -> None:
        drop = stranger.drop
        self.leave(stranger)
        drop(reason)


def _nothing(reason: str) -> None:
    """Default of ``drop``, before there is a connection to end."""


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _group_of(host: str) -> str:
    """The address; for IPv6 the network of the host, which may use any address in it."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    return str(address.ipv4_mapped or int(address) >> 64)


def _listeners(host: str, port: int) -> list[socket.socket]:
    """Open a socket for each address of ``host``, all at one port. Raises OSError."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    problem: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        if port == 0 and listeners:
            address = (address[0], listeners[0].getsockname()[1], *address[2:])
        try:
            listener = socket.socket(family, kind, protocol)
        except OSError as error:  # the kernel lacks this address family
            problem = error
            continue
        try:
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(4096)
        except OSError as error:
            listener.close()
            problem = error
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            for other in listeners:
                other.close()
            raise
        listeners.append(listener)
    if not listeners:
        raise problem or OSError(errno.EADDRNOTAVAIL, "no address to listen on")
    return listeners
