"""GET of what pods of queues and etcd say over HTTP. Users choose images and addresses, so an answer may be endless,
slow, or lead elsewhere: it is bounded in time and size, and never followed.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from urllib.parse import urlsplit

__all__ = ["fetch"]

_TIMEOUT_S = 2.0
_LONGEST = 16 << 20
"""Bytes; a controller with thousands of storage units says less."""


def fetch(url: str, timeout: float = _TIMEOUT_S) -> tuple[int, bytes]:
    """Blocking. Status and body, which is complete. No proxy is used: these addresses are near.

    Raises OSError and HTTPException, ValueError for an address that is none.
    """
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError(f"{url} names no host")
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
    connection.connect()
    connected, late = connection.sock, threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(OSError):  # the other side was faster
            connected.shutdown(socket.SHUT_RDWR)

    # Each byte restarts the timeout of the socket.
    timer = threading.Timer(timeout, end)
    timer.start()
    try:
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        body = answer.read(_LONGEST + 1)
        if late.is_set():
            raise TimeoutError(f"no complete answer within {timeout} s")
        if len(body) > _LONGEST:
            raise OSError(f"an answer of more than {_LONGEST} bytes")
        if answer.length:  # how much is missing
            raise http.client.IncompleteRead(body, answer.length)
        return answer.status, body
    finally:
        timer.cancel()
        connection.close()
