"""A TCP proxy on loopback that treats what passes as a bad network does."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Proxy", "running_proxy"]

_TICK_S = 0.01


class Proxy:
    """Passes connections on to ``target`` (host:port). The attributes are faults; set them from any thread.

    ``delay_s``: longest delay of what is read at a time. ``held``: nothing passes in either direction. ``repeat``:
    share of what is read at a time that is sent twice.
    """

    def __init__(self, target: str, seed: int) -> None:
        self.target = target
        self.delay_s = 0.0
        self.held = False
        self.repeat = 0.0
        self.spoilt = 0
        """How often something was repeated."""
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
        self.delay_s = self.repeat = 0.0
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
        with contextlib.suppress(OSError):  # an end of the connection is gone, and so is this way
            while data := await reader.read(1 << 16):
                while (self.held or number in self._frozen) and not self._stopped:  # noqa: ASYNC110  other threads say when
                    await asyncio.sleep(_TICK_S)
                if self.delay_s:
                    await asyncio.sleep(self.delay_s * self._random.random())
                if self._random.random() < self.repeat:
                    data += data
                    self.spoilt += 1
                writer.write(data)
                await writer.drain()


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
