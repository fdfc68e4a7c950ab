"""The log of several masters, as it is in etcd.

The leader acknowledges a stored key before the entry for it is in etcd, from where the next leader takes it. A key
whose entry is not there yet is gone if the leader ends in that moment. The layout is that of Mooncake 0.3.13:
``/oplog/CLUSTER/durable_prefix`` and ``/oplog/CLUSTER/batches/NUMBER`` with
``[schema, number, first, last, [[operation, tenant, key, payload], …], checksum]``.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from transfer_queue.backoff import Backoff
from transfer_queue.config.attach import parse_address
from transfer_queue.errors import ConnectionLostError

__all__ = ["Follower", "MasterLog", "UnknownLogError"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_TIMEOUT_S = 3.0
_BATCHES = 64
"""Read at once; each has up to 1,024 entries."""
_PUT_END = 1
_POLL_S = (0.001, 0.05)
_PATIENCE_S = 5.0
_BEHIND_S = 5.0
_QUIET_S = 1.0
"""Without a new batch, until the log may have started over."""


class _Pair(msgspec.Struct):
    value: bytes = b""
    create_revision: str = "0"


class _Range(msgspec.Struct):
    kvs: list[_Pair] = []


class _Prefix(msgspec.Struct):
    batch_id: int


class _Batch(msgspec.Struct, array_like=True):
    schema: int
    number: int
    first: int
    last: int
    entries: list[tuple[int, str, str, str]]


class UnknownLogError(Exception):
    """There is no log, or none that can be read: masters without one, an etcd without its JSON API, another layout."""


class NoLogError(UnknownLogError):
    """There is no log of masters with this cluster id."""


class MasterLog:
    """Blocking. Methods raise ConnectionLostError if no member of etcd answers, UnknownLogError."""

    def __init__(self, members: str, cluster: str) -> None:
        """``members``: host:port, several with ``;`` between. ``cluster``: ``--cluster_id`` of the masters."""
        self._members = [parse_address(member) for member in members.removeprefix("etcd://").split(";")]
        self._cluster = cluster
        self._connection: http.client.HTTPConnection | None = None

    def last(self) -> int:
        """Number of the newest batch."""
        found = self._range(f"/oplog/{self._cluster}/durable_prefix")
        if not found:
            raise NoLogError(f"there is no log of masters with the cluster id {self._cluster} in etcd")
        return _decoded(found[0].value, _Prefix).batch_id

    def stored(self, after: int) -> tuple[int, list[str]]:
        """Number of the last batch that was read, and the keys stored according to batches behind ``after``."""
        start, end = (f"/oplog/{self._cluster}/batches/{number}" for number in (f"{after + 1:020}", ":"))
        keys: list[str] = []
        for pair in self._range(start, end):
            batch = _decoded(pair.value, _Batch)
            keys += [key for operation, _, key, _ in batch.entries if operation == _PUT_END]
            after = max(after, batch.number)
        return after, keys

    def term(self) -> str:
        """Identity of the leader; empty while there is none."""
        found = self._range(f"mooncake-store/{self._cluster}/master_view")
        return found[0].create_revision if found else ""

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _range(self, start: str, end: str = "") -> list[_Pair]:
        wanted: dict[str, Any] = {"key": base64.b64encode(start.encode()).decode()}
        if end:
            wanted |= {"range_end": base64.b64encode(end.encode()).decode(), "limit": _BATCHES}
        body = msgspec.json.encode(wanted)
        reason = ""
        for _ in range(len(self._members) + 1):  # the connection of before may have ended since
            try:
                return self._ask(body).kvs
            except (OSError, http.client.HTTPException) as error:
                reason = str(error) or type(error).__name__
                self.close()
                self._members.append(self._members.pop(0))
        raise ConnectionLostError(f"the etcd of the Mooncake masters does not answer ({reason})")

    def _ask(self, body: bytes) -> _Range:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(*self._members[0], timeout=_TIMEOUT_S)
        self._connection.request("POST", "/v3/kv/range", body)
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status >= 500:
            raise http.client.HTTPException(f"HTTP {answer.status}")
        if answer.status != 200:
            raise UnknownLogError(f"etcd has no JSON API, or refuses it: HTTP {answer.status}")
        return _decoded(text, _Range)


def _decoded(text: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise UnknownLogError(f"the log of the masters is not as that of Mooncake 0.3.13: {error}") from None


class _Thread(Protocol):
    def __call__(self, job: Callable[[], T], /) -> Awaitable[T]: ...


class Follower:
    """Waits until keys are in the log. All that wait share what is read of it."""

    def __init__(self, log: MasterLog, run: _Thread) -> None:
        """``run``: has a thread make a blocking call, one after the other."""
        self._log = log
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._after = 0
        self._read_at = -math.inf
        self._awaited: set[str] = set()
        self._reading = asyncio.Lock()
        self._unknown = False

    async def expect(self, keys: Iterable[str]) -> None:
        """To be called before ``keys`` are stored. Raises ConnectionLostError."""
        if self._is_behind():
            async with self._reading:
                if self._is_behind():
                    self._after = await self._read(self._last, self._after)
                self._awaited.update(keys)
        else:
            self._awaited.update(keys)

    def _is_behind(self) -> bool:
        """Whether no caller waits, and the log may have grown much since the last one did."""
        return not self._awaited and self._loop.time() > self._read_at + _BEHIND_S

    async def missing(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        """Those of ``keys`` that are not in the log ``timeout_s`` seconds from now. Raises ConnectionLostError."""
        deadline, backoff = self._loop.time() + timeout_s, Backoff(*_POLL_S)
        quiet = self._loop.time() + _QUIET_S
        while True:
            async with self._reading:
                before = self._after
                if left := [key for key in keys if key in self._awaited]:
                    nothing: tuple[int, list[str]] = (before, [])
                    self._after, stored = await self._read(partial(self._log.stored, before), nothing)
                    self._awaited.difference_update(stored)
                    left = [key for key in left if key in self._awaited]
                    if left and self._after == before and self._loop.time() >= quiet:
                        quiet = self._loop.time() + _QUIET_S
                        if await self._read(self._last, before) < before:
                            self._after = 0
            if not left or self._unknown:
                return []
            if self._loop.time() >= deadline:
                return left
            if self._after == before:
                await asyncio.sleep(backoff.next_s())

    async def _read(self, job: Callable[[], T], otherwise: T) -> T:
        give_up = self._loop.time() + _PATIENCE_S
        while not self._unknown:
            try:
                found = await self._run(job)
            except ConnectionLostError:  # a member of etcd starts again
                if self._loop.time() >= give_up:
                    raise
                await asyncio.sleep(_POLL_S[1])
            except UnknownLogError as error:
                self._unknown = True
                log.warning("%s; what is stored in the last moments before a master ends may be lost", error)
            else:
                self._read_at = self._loop.time()
                return found
        return otherwise

    def _last(self) -> int:
        """Blocking. Number of the newest batch; 0 if etcd has lost the log, as the masters begin another then."""
        try:
            return self._log.last()
        except NoLogError:
            if self._read_at == -math.inf:  # there never was one
                raise
            return 0

    def forget(self, keys: Iterable[str]) -> None:
        """Stop waiting for ``keys``."""
        self._awaited.difference_update(keys)
