"""Mooncake itself over TCP: registered buffers, one key for every 64 MiB, a segment in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np

from bench.data import Batch, arrays
from bench.peers.base import Peer
from bench.peers.mooncake_master import Master

SEGMENT = 2 << 30
PART = 64 << 20


def open_store(segment: int, metadata: str, master: str) -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", metadata, segment, 16 << 20, "tcp", "", master)
    if code:
        raise RuntimeError(f"Mooncake does not start: {code}")
    return store


class MooncakeRaw(Peer):
    def __init__(self) -> None:
        self._version = 0
        self._parts: list[tuple[int, int]] = []  # offset, bytes
        self._layout: dict[str, tuple[int, Any]] = {}

    def start(self, attach: dict[str, Any] | None) -> None:
        self._master = Master()
        self._holder = subprocess.Popen(
            [sys.executable, "-m", "bench.peers.mooncake_raw", self._master.metadata, self._master.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            raise RuntimeError("the process with Mooncake's segment ended")
        self._store = open_store(0, self._master.metadata, self._master.address)

    def stop(self) -> None:
        self._store.close()
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait(30)
        self._master.stop()

    def prepare(self, batch: Batch) -> Any:
        columns = arrays(batch)
        total = sum(array.nbytes for array in columns.values())
        self._source, self._target = np.empty(total, np.uint8), np.ones(total, np.uint8)
        self._layout, self._parts, offset = {}, [], 0
        for name, array in columns.items():
            flat = array.reshape(-1).view(np.uint8)
            self._source[offset : offset + flat.nbytes] = flat
            self._layout[name] = (offset, array)
            self._parts += [(offset + at, min(PART, flat.nbytes - at)) for at in range(0, flat.nbytes, PART)]
            offset += flat.nbytes
        for buffer in (self._source, self._target):
            if code := self._store.register_buffer(buffer.ctypes.data, total):
                raise RuntimeError(f"Mooncake does not register a buffer of {total} bytes: {code}")
        return self._source

    def _keys(self) -> list[str]:
        return [f"{self._version}.{number}" for number in range(len(self._parts))]

    def put(self, prepared: Any) -> None:
        self._version += 1
        at = [prepared.ctypes.data + offset for offset, _ in self._parts]
        codes = self._store.batch_put_from(self._keys(), at, [nbytes for _, nbytes in self._parts])
        if any(codes):
            raise RuntimeError(f"Mooncake put: {codes}")

    def get(self) -> Any:
        at = [self._target.ctypes.data + offset for offset, _ in self._parts]
        sizes = [nbytes for _, nbytes in self._parts]
        if list(self._store.batch_get_into(self._keys(), at, sizes)) != sizes:
            raise RuntimeError("Mooncake get failed")
        return self._target

    def column(self, got: Any, name: str) -> Any:
        offset, array = self._layout[name]
        return got[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)

    def drop(self) -> None:
        for key in self._keys():
            self._store.remove(key, True)


PEER = MooncakeRaw

if __name__ == "__main__":
    held = open_store(SEGMENT, sys.argv[1], sys.argv[2])
    print("ready", flush=True)
    sys.stdin.read()
    held.close()
