"""A TCP proxy on loopback that treats what passes as a bad network does."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from transfer_queue.wire.messages import Kind

__all__ = ["Proxy", "running_proxy"]

_TICK_S = 0.01
_LATE_S = 0.03
"""How long a message is kept back if none comes after it."""
_RETRANSMIT_S = 0.2
_HEAD = struct.Struct("<IIQ")
_FIRST_REQUEST = 1000
"""Requests of a client's session; those of the handshake are below."""


class Proxy:
    """Passes connections on to ``target`` (host:port). The attributes are faults; set them from any thread.

    ``delay_s``: longest delay of what is read at a time. ``held``: nothing passes in either direction. ``repeat``:
    share of what is read at a time that is followed by some of it again. ``loss``: share of packets that are lost, so
    that what follows waits for another try, as TCP does it. ``reset``: share of what is read at a time that ends its
    connection instead. ``duplicate``, ``reorder``: share of messages that come a second time after later ones, or only
    after later ones; of those that do not depend on others before them: ``kinds``.
    """

    def __init__(self, target: str, seed: int) -> None:
        self.target = target
        self.delay_s = 0.0
        self.held = False
        self.repeat = 0.0
        self.loss = self.reset = 0.0
        self.duplicate = self.reorder = 0.0
        self.kinds = {Kind.REQUEST, Kind.REPLY}
        self.spoilt = 0
        """How often something was repeated, lost, reset, or came late."""
        self.address = ""
        self._random = random.Random(seed)
        self._frozen: set[int] = set()
        self._links: set[int] = set()
        self._next = 0
        self._open = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._stopped = False

    def freeze(self) -> None:
        """Nothing passes over the connections of now any more, and neither end is told."""
        self._frozen |= self._links

    def heal(self) -> None:
        """No faults from now on, except for frozen connections."""
        self.delay_s = self.repeat = self.loss = self.reset = self.duplicate = self.reorder = 0.0
        self.held = False

    async def serve(self, stop: asyncio.Event, started: threading.Event) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        started.set()
        await stop.wait()
        server.close()
        self._stopped = True
        for writer in list(self._writers):
            writer.transport.abort()
        while self._open:  # noqa: ASYNC110  they end now, each in its own time
            await asyncio.sleep(_TICK_S)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            await self._connect(reader, writer)
        finally:
            writer.close()
            self._open -= 1

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self._next = self._next, self._next + 1
        host, port = self.target.rsplit(":", 1)
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:  # the target is away: as if nobody listened here
            return
        self._links.add(number)
        self._writers |= {writer, far_writer}
        try:
            ways = [self._pass(number, reader, far_writer), self._pass(number, far_reader, writer)]
            tasks = [asyncio.ensure_future(way) for way in ways]
            _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        finally:
            self._links.discard(number)
            self._writers -= {writer, far_writer}
            far_writer.close()

    async def _pass(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = _Frames()
        late: list[bytes] = []
        with contextlib.suppress(OSError):  # an end of the connection is gone, and so is this way
            while (data := await _read(reader, bool(late))) != b"":
                while (self.held or number in self._frozen) and not self._stopped:  # noqa: ASYNC110  other threads say when
                    await asyncio.sleep(_TICK_S)
                if self._random.random() < self.reset:
                    self.spoilt += 1
                    writer.transport.abort()
                    return
                if self.delay_s:
                    await asyncio.sleep(self.delay_s * self._random.random())
                await asyncio.sleep(self._retransmission_s())
                whole, late = self._disorder(frames.cut(data or b""), late)
                passed = b"".join(whole)
                if passed and self._random.random() < self.repeat:
                    passed += passed[self._random.randrange(len(passed)) :]
                    self.spoilt += 1
                writer.write(passed)
                await writer.drain()

    def _retransmission_s(self) -> float:
        """How long TCP takes to bring a packet through: its pauses double with each loss."""
        waited, pause = 0.0, _RETRANSMIT_S
        while self._random.random() < self.loss:
            waited, pause = waited + pause, 2 * pause
            self.spoilt += 1
        return waited

    def _disorder(self, frames: list[bytes], late: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """What to send now, and what later. ``late``: what was kept back before."""
        now: list[bytes] = []
        kept: list[bytes] = []
        for frame in frames:
            if not self._is_independent(frame):
                now += [*late, *kept, frame]
                late, kept = [], []
            elif self._random.random() < self.reorder:
                kept.append(frame)
            else:
                self.spoilt += len(kept) > 0 or len(late) > 0
                now.append(frame)
                if self._random.random() < self.duplicate:
                    kept.append(frame)
                    self.spoilt += 1
        return now + late, kept

    def _is_independent(self, frame: bytes) -> bool:
        """Whether it is a whole message that may come in any order."""
        _, nbytes, payload = _HEAD.unpack_from(frame)
        kind, request, total, *_ = [*msgspec.msgpack.decode(frame[_HEAD.size : _HEAD.size + nbytes]), 0, 0, 0]
        return kind in self.kinds and total == payload and (kind == Kind.NOTICE or request >= _FIRST_REQUEST)


class _Frames:
    """Cuts what comes over a connection into its frames."""

    def __init__(self) -> None:
        self._rest = b""

    def cut(self, data: bytes) -> list[bytes]:
        self._rest += data
        frames = []
        while len(self._rest) >= _HEAD.size:
            _, header, payload = _HEAD.unpack_from(self._rest)
            nbytes = _HEAD.size + header + payload
            if len(self._rest) < nbytes:
                break
            frames.append(self._rest[:nbytes])
            self._rest = self._rest[nbytes:]
        return frames


async def _read(reader: asyncio.StreamReader, briefly: bool) -> bytes | None:
    """What came; nothing at the end; with ``briefly`` None if nothing comes soon."""
    if not briefly:
        return await reader.read(1 << 16)
    try:
        return await asyncio.wait_for(reader.read(1 << 16), _LATE_S)
    except (TimeoutError, asyncio.TimeoutError):
        return None


@contextmanager
def running_proxy(target: str, seed: int) -> Iterator[Proxy]:
    """A proxy in a thread of its own."""
    proxy = Proxy(target, seed)
    loop = asyncio.new_event_loop()
    stop, started = asyncio.Event(), threading.Event()

    def run() -> None:
        loop.run_until_complete(proxy.serve(stop, started))
        loop.close()

    thread = threading.Thread(target=run, name="proxy")
    thread.start()
    try:
        assert started.wait(60)
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        assert not thread.is_alive()
