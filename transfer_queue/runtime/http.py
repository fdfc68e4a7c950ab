"""A tiny HTTP server for /metrics, /healthz, /readyz and what a server adds, such as the controller's page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, generate_latest

from transfer_queue.config.attach import join_address
from transfer_queue.errors import StartError
from transfer_queue.runtime.server import advertised_host
from transfer_queue.web import CONTENT_POLICY

__all__ = ["Page", "StatusServer"]

Page = Callable[[], tuple[str, bytes]]
"""Gives content type and content."""

_TEXT = "text/plain; charset=utf-8"
_HEADERS = (
    f"Content-Security-Policy: {CONTENT_POLICY}\r\nX-Content-Type-Options: nosniff\r\n"
    "Referrer-Policy: no-referrer\r\nCache-Control: no-store\r\n"
)


class StatusServer:
    """``ready()`` gives an empty string when this process is ready, else what is missing. ``pages``: by path."""

    def __init__(
        self, registry: CollectorRegistry, ready: Callable[[], str], pages: Mapping[str, Page] | None = None
    ) -> None:
        self._registry = registry
        self._ready = ready
        self._pages = dict(pages or {})
        self._server: asyncio.Server | None = None
        self.address = ""

    async def listen(self, host: str, port: int, advertise: str | None) -> None:
        """Raises StartError."""
        try:
            self._server = await asyncio.start_server(self._serve, host or None, port, limit=16 << 10)
        except OSError as error:
            reason = "the port is in use; set metricsPort to another port" if "in use" in str(error) else error.strerror
            raise StartError(f"cannot serve metrics on {join_address(host, port)}: {reason}") from None
        self.address = join_address(advertised_host(host, advertise), self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            request_line = head.split(b"\r\n", 1)[0].split()
            status, content_type, body = self._answer(request_line)
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
                f"{_HEADERS}Connection: close\r\n\r\n".encode()
                + (b"" if request_line[:1] == [b"HEAD"] else body)
            )
            await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError, TimeoutError, OSError):
            pass  # the scraper went away or does not speak HTTP
        finally:
            writer.close()

    def _answer(self, request_line: list[bytes]) -> tuple[str, str, bytes]:
        if len(request_line) != 3 or request_line[0] not in (b"GET", b"HEAD"):
            return "405 Method Not Allowed", _TEXT, b"only GET\n"
        path = request_line[1].split(b"?")[0]
        if path == b"/metrics":
            return "200 OK", "text/plain; version=0.0.4; charset=utf-8", generate_latest(self._registry)
        if path == b"/healthz":
            return "200 OK", _TEXT, b"ok\n"
        if path == b"/readyz":
            missing = self._ready()
            return ("503 Service Unavailable" if missing else "200 OK"), _TEXT, f"{missing or 'ready'}\n".encode()
        page = self._pages.get(path.decode(errors="replace"))
        if page is not None:
            return "200 OK", *page()
        known = ", ".join(["/metrics", "/healthz", "/readyz", *self._pages])
        return "404 Not Found", _TEXT, f"not here; try {known}\n".encode()
