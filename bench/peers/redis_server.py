"""redis over TCP on loopback: one value a column."""

from __future__ import annotations

import socket
import subprocess
import time
from typing import Any

import numpy as np
import redis

from bench.data import Array, Batch, Ragged, arrays
from bench.peers.base import Peer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Redis(Peer):
    def __init__(self) -> None:
        self._dtypes: dict[str, Any] = {}
        self._server: subprocess.Popen[bytes]
        self._client: Any

    def start(self, attach: dict[str, Any] | None) -> None:
        port = free_port()
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._client = redis.Redis(port=port)
        deadline = time.monotonic() + 20
        while True:
            try:
                self._client.ping()
                return
            except redis.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def stop(self) -> None:
        self._client.close()
        self._server.terminate()
        self._server.wait(10)

    def prepare(self, batch: Batch) -> dict[str, Any]:
        offsets = {f"{name}.offsets": column.offsets for name, column in batch.items() if isinstance(column, Ragged)}
        prepared = {**arrays(batch), **offsets}
        self._dtypes = {name: (array.dtype, array.shape) for name, array in prepared.items()}
        return prepared

    def put(self, prepared: dict[str, Array]) -> None:
        for name, array in prepared.items():
            self._client.set(name, array.data.cast("B"))

    def get(self) -> dict[str, Array]:
        return {
            name: np.frombuffer(self._client.get(name), dtype).reshape(shape)
            for name, (dtype, shape) in self._dtypes.items()
        }

    def column(self, got: dict[str, Array], name: str) -> Any:
        return got[name]

    def drop(self) -> None:
        self._client.flushall()

    def prepare_small(self) -> bytes:
        return bytes(1024)

    def put_small(self, number: int, prepared: bytes) -> None:
        self._client.set(f"k{number}", prepared)

    def get_small(self, number: int) -> Any:
        return self._client.get(f"k{number}")


PEER = Redis
