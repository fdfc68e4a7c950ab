"""A port on which a server that a program of 0.1.x made receives settings that were unknown when it was made."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

from transfer_queue.errors import NotAuthorizedError, TransferQueueError
from transfer_queue.runtime.secret import is_proof, masked

__all__ = ["JoinListener"]

_LINE_S = 5.0
"""Time limit for a peer to send its line, and to receive the answer."""
_PLACES = 16
"""Connections that are served at once; more are closed."""
_LINE_BYTES = 4096


class JoinListener:
    """Answers one JSON line per connection in a thread, with the result of ``answer`` or an ``error`` that begins with
    ``name``. It accepts only lines with a proof that the peer knows ``secret``."""

    def __init__(self, name: str, host: str, secret: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._name = name
        self._secret = secret
        self._answer = answer
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port = int(self._listener.getsockname()[1])
        self._places = threading.BoundedSemaphore(_PLACES)
        self._thread = threading.Thread(target=self._serve, name="tq-join", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread; closing alone would not
        self._listener.close()
        self._thread.join()

    def _check(self, asked: dict[str, Any]) -> None:
        nonce, proof = bytes.fromhex(asked["nonce"]), bytes.fromhex(asked["proof"])
        if not is_proof(proof, self._secret, "client", self.port, nonce):
            raise NotAuthorizedError("the request has no valid proof; use the zmq_info of this server's owner")
        if asked.get("secret"):
            asked["secret"] = masked(asked["secret"], self._secret, self.port, nonce)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # shut down
                return
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve_one, args=(connection,), name="tq-join-one", daemon=True).start()

    def _serve_one(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):  # the peer has gone, or was silent; it may ask again
                late = threading.Timer(_LINE_S, lambda: _end(connection))
                late.daemon = True
                late.start()
                try:
                    with connection.makefile("rb") as stream:
                        line = stream.readline(_LINE_BYTES)
                finally:
                    late.cancel()
                try:
                    asked = json.loads(line)
                    self._check(asked)
                    answer = self._answer(asked)
                except (TransferQueueError, ValueError, KeyError, TypeError, RecursionError) as error:
                    answer = {"error": f"{self._name}: {error}"}
                connection.settimeout(_LINE_S)
                connection.sendall(json.dumps(answer).encode() + b"\n")
        finally:
            self._places.release()


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it ended by itself
        connection.shutdown(socket.SHUT_RDWR)
