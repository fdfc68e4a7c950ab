"""A port on which a server that a program of 0.1.x made receives settings that were unknown when it was made."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

from transfer_queue.errors import NotAuthorizedError, TransferQueueError
from transfer_queue.runtime.secret import is_proof

__all__ = ["JoinListener"]

_ANSWER_S = 60.0
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

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # shut down
                return
            with connection, connection.makefile("rwb") as stream:
                connection.settimeout(_ANSWER_S)
                try:
                    asked = json.loads(stream.readline(_LINE_BYTES))
                    self._check(asked)
                    answer = self._answer(asked)
                except (TransferQueueError, ValueError, KeyError, TypeError, RecursionError, OSError) as error:
                    answer = {"error": f"{self._name}: {error}"}
                try:
                    stream.write(json.dumps(answer).encode() + b"\n")
                    stream.flush()
                except OSError:  # the peer has gone; it may ask again
                    continue
