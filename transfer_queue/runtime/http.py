"""A tiny HTTP server for /metrics, /healthz, /readyz and what a server adds, such as the controller's page."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from time import monotonic
from typing import cast
from urllib.parse import parse_qsl

from transfer_queue.config.attach import join_address
from transfer_queue.errors import StartError
from transfer_queue.runtime.gate import Gate, Refusals, Stranger
from transfer_queue.runtime.long_answers import Slices
from transfer_queue.runtime.metrics import Metrics
from transfer_queue.runtime.server import advertised_host
from transfer_queue.web import CONTENT_POLICY

__all__ = ["Page", "StatusServer"]

Page = Callable[[Mapping[str, str]], Awaitable[tuple[str, list[bytes]]]]
"""Takes what follows the ? of an address; returns the content type and the content in parts."""

_ASKERS, _ASKERS_OF_ADDRESS = 128, 64
"""Most simultaneous connections, in total and from one address."""
_HEAD_BYTES, _HEAD_S = 8 << 10, 5.0
"""Of a request."""
_ANSWER_S = 30.0
"""Time limit of a connection, including the transfer of its answer."""
_UNREAD_BYTES = 16 << 20
"""Most bytes of answers that peers have not read yet, unless one answer alone is longer. Beyond it the oldest answer
ends, so that slow peers neither fill the memory nor keep others away."""
_PIECE = 64 << 10
_TEXT = "text/plain; charset=utf-8"
_HEADERS = (
    f"Content-Security-Policy: {CONTENT_POLICY}\r\nX-Content-Type-Options: nosniff\r\n"
    "Referrer-Policy: no-referrer\r\nCache-Control: no-store\r\n"
)


class StatusServer:
    """``metrics`` are served at /metrics, after ``before_scrape`` has computed what is slow. ``ready()`` returns an
    empty string if this process is ready, otherwise what is missing. ``pages``: pages by path."""

    def __init__(
        self,
        metrics: Metrics,
        ready: Callable[[], str],
        pages: Mapping[str, Page] | None = None,
        before_scrape: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._metrics = metrics
        self._ready = ready
        self._pages = dict(pages or {})
        self._before_scrape = before_scrape
        self._gate: Gate | None = None
        self._unread: dict[_Exchange, int] = {}
        """Bytes of the answers that are under way, the oldest first."""
        self._scraping = asyncio.Lock()
        self._scraped: tuple[float, list[bytes]] = (0.0, [])
        """When the latest scrape began, and its answer."""
        self.address = ""

    async def listen(self, host: str, port: int, advertise: str | None) -> None:
        """Raises StartError."""
        gate = Gate(
            self._open,
            Refusals(),
            patience_s=_ANSWER_S,
            per_address=_ASKERS_OF_ADDRESS,
            total=_ASKERS,
        )
        try:
            bound = gate.listen(host, port)
        except OSError as error:
            reason = "the port is in use; set metricsPort to another port" if "in use" in str(error) else error.strerror
            raise StartError(f"cannot serve metrics on {join_address(host, port)}: {reason}") from None
        self._gate = gate
        self.address = join_address(advertised_host(host, advertise), bound)

    def close(self) -> None:
        if self._gate is not None:
            self._gate.close()

    async def _open(self, accepted: socket.socket, stranger: Stranger) -> None:
        exchange = _Exchange()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: exchange, accepted)
            await self._serve(exchange)
        except (asyncio.TimeoutError, TimeoutError, OSError):
            pass  # the scraper went away or does not speak HTTP
        finally:
            self._unread.pop(exchange, None)
            exchange.close()
            if self._gate is not None:
                self._gate.leave(stranger)

    async def _serve(self, exchange: _Exchange) -> None:
        head = await asyncio.wait_for(exchange.head(), _HEAD_S)
        request_line = head.split(b"\r\n", 1)[0].split()
        status, content_type, parts = await self._answer(request_line)
        self._make_room(exchange, sum(map(len, parts)))
        await exchange.write(
            f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {sum(map(len, parts))}\r\n"
            f"{_HEADERS}Connection: close\r\n\r\n".encode()
        )
        if request_line[:1] != [b"HEAD"]:
            for piece in _pieces(parts):
                await exchange.write(piece)
                await asyncio.sleep(0)
        await exchange.flush()

    async def _scrape(self) -> list[bytes]:
        """One scrape at a time, a little at a time. All who ask during a scrape share the next one."""
        asked = monotonic()
        async with self._scraping:
            if self._scraped[0] < asked:
                began = monotonic()
                if self._before_scrape is not None:
                    await self._before_scrape()
                self._scraped = began, await Slices().collect(self._metrics.text())
            return self._scraped[1]

    def _make_room(self, exchange: _Exchange, nbytes: int) -> None:
        """Count an answer, and close the connections of the oldest answers until it fits."""
        left = _UNREAD_BYTES - nbytes
        for oldest in list(self._unread):
            if sum(self._unread.values()) <= left:
                break
            del self._unread[oldest]
            oldest.close()
        self._unread[exchange] = nbytes

    async def _answer(self, request_line: list[bytes]) -> tuple[str, str, list[bytes]]:
        if len(request_line) != 3 or request_line[0] not in (b"GET", b"HEAD"):
            return "405 Method Not Allowed", _TEXT, [b"only GET\n"]
        path, _, query = request_line[1].partition(b"?")
        if path == b"/metrics":
            return "200 OK", "text/plain; version=0.0.4; charset=utf-8", await self._scrape()
        if path == b"/healthz":
            return "200 OK", _TEXT, [b"ok\n"]
        if path == b"/readyz":
            missing = self._ready()
            return ("503 Service Unavailable" if missing else "200 OK"), _TEXT, [f"{missing or 'ready'}\n".encode()]
        page = self._pages.get(path.decode(errors="replace"))
        if page is not None:
            return "200 OK", *await page(dict(parse_qsl(query.decode(errors="replace"))))
        known = ", ".join(["/metrics", "/healthz", "/readyz", *self._pages])
        return "404 Not Found", _TEXT, [f"not here; try {known}\n".encode()]


def _pieces(parts: list[bytes]) -> Iterator[bytes]:
    """The content in pieces of one size, as a page may have thousands of short parts."""
    piece = bytearray()
    for part in parts:
        for start in range(0, len(part), _PIECE):
            piece += part[start : start + _PIECE]
            if len(piece) >= _PIECE:
                yield bytes(piece)
                piece.clear()
    yield bytes(piece)


class _Exchange(asyncio.BufferedProtocol):
    """One request and its answer. It reads no more than the largest head of a request, and buffers no more than a piece
    of the answer."""

    def __init__(self) -> None:
        self._buffer = bytearray(_HEAD_BYTES)
        self._filled = 0
        self._changed = asyncio.Event()
        self._paused = False
        self._lost = False
        self._transport: asyncio.Transport | None = None

    async def head(self) -> bytes:
        """The head of the request, or what came so far if it is not HTTP. Raises ConnectionError."""
        while (end := self._buffer.find(b"\r\n\r\n", 0, self._filled)) < 0:
            if self._filled and self._buffer[0] < 0x20 and self._buffer[0] not in b"\r\n":
                return bytes(self._buffer[: self._filled])  # its answer tells a client of another kind of port
            if self._filled == _HEAD_BYTES:
                raise ConnectionError("no head of a request")
            await self._wait()
        return bytes(self._buffer[:end])

    async def write(self, data: bytes) -> None:
        """Wait until the peer has read the earlier output. Raises ConnectionError."""
        await self.flush()
        if self._transport is not None:
            self._transport.write(data)

    async def flush(self) -> None:
        """Wait until the peer has read all output. Raises ConnectionError."""
        while self._paused:
            await self._wait()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=0)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled == _HEAD_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._changed.set()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._transport = None
        self._changed.set()

    async def _wait(self) -> None:
        if self._lost:
            raise ConnectionError("the peer went away")
        self._changed.clear()
        await self._changed.wait()
        if self._lost:
            raise ConnectionError("the peer went away")
