"""The limit of this machine over TCP: blocking sockets between two processes, into and out of warm memory."""

from __future__ import annotations

import multiprocessing
import socket
import struct
from typing import Any

import numpy as np

from bench.data import Array, Batch, arrays
from bench.peers.base import Peer

_PIECE = 1 << 20


def _send(end: socket.socket, memory: Array) -> None:
    for start in range(0, memory.nbytes, _PIECE):
        end.sendall(memory[start : start + _PIECE].data)


def _receive(end: socket.socket, memory: Array) -> None:
    start = 0
    while start < memory.nbytes:
        taken = end.recv_into(memory[start:].data)
        if not taken:
            raise EOFError("the other end is gone")
        start += taken


def _hold(end: socket.socket) -> None:
    """Receive a batch and give it back, again and again, until the peer closes."""
    memory = np.empty(0, np.uint8)
    while header := end.recv(8, socket.MSG_WAITALL):
        (nbytes,) = struct.unpack("<q", header)
        if memory.nbytes != nbytes:
            memory = np.ones(nbytes, np.uint8)
        _receive(end, memory)
        end.sendall(b"k")
        end.recv(1)
        _send(end, memory)


class Loopback(Peer):
    """A batch is one run of bytes; a get must follow each put."""

    def __init__(self) -> None:
        self._end: socket.socket
        self._holder: Any
        self._warm: Array
        self._columns: dict[str, Array]

    def start(self, attach: dict[str, Any] | None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._end = socket.create_connection(listener.getsockname())
            other, _ = listener.accept()
        for end in (self._end, other):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._holder = multiprocessing.get_context("fork").Process(target=_hold, args=(other,), daemon=True)
        self._holder.start()
        other.close()

    def stop(self) -> None:
        self._end.close()
        self._holder.join(10)

    def prepare(self, batch: Batch) -> Array:
        columns = arrays(batch)
        data = np.concatenate([array.reshape(-1).view(np.uint8) for array in columns.values()])
        self._warm = np.ones_like(data)
        parts = np.split(self._warm, np.cumsum([array.nbytes for array in columns.values()])[:-1])
        self._columns = {
            name: part.view(array.dtype).reshape(array.shape)
            for (name, array), part in zip(columns.items(), parts, strict=True)
        }
        return data

    def put(self, prepared: Array) -> None:
        self._end.sendall(struct.pack("<q", prepared.nbytes))
        _send(self._end, prepared)
        self._end.recv(1)

    def get(self) -> dict[str, Array]:
        self._end.sendall(b"g")
        _receive(self._end, self._warm)
        return self._columns

    def column(self, got: dict[str, Array], name: str) -> Any:
        return got[name]


PEER = Loopback
