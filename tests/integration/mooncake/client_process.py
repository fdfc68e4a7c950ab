"""A Mooncake client in a process of its own, driven by JSON lines: an engine keeps to the etcd it met first.

``python -m tests.integration.mooncake.client_process SETTINGS_JSON RUN UNIT_JSON`` prints ["ready", null]. After
["write", count] so many writers put one block after the other; each block that was acknowledged is printed as
["stored", number]. ["get", numbers] reads blocks and ["stop"] ends the writers; both are answered by ["answer", value],
for each number "same", "other bytes" or the name of what was raised. It does without torch, which is slow to import.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys

import msgspec
import numpy as np

from tests.integration.mooncake.clients import client
from transfer_queue.columns.block import EncodedBlock
from transfer_queue.columns.column import ColumnView
from transfer_queue.control.schema import FieldSchema
from transfer_queue.errors import ConnectionLostError, TransferQueueError
from transfer_queue.storage.base import BlockRead, UnitInfo
from transfer_queue.storage.mooncake.client import MooncakeBackend

PAUSE_S = 0.1
"""Between puts: all blocks have to fit into the unit."""
LEADERLESS_S = 90.0


def block_of(number: int) -> EncodedBlock:
    """64 KiB that no other block has."""
    values = np.random.default_rng(number).integers(0, 256, 1 << 16, np.uint8)
    return EncodedBlock(64, [ColumnView(FieldSchema("x", "dense", "uint8", (1024,)), 64, [values], None)])


def say(*words: object) -> None:
    print(json.dumps(words), flush=True)


class Blocks:
    def __init__(self, backend: MooncakeBackend, unit: UnitInfo) -> None:
        self._backend, self._unit = backend, unit
        self._stopped = asyncio.Event()
        self._writers: list[asyncio.Task[None]] = []

    def write(self, count: int) -> None:
        self._writers += [asyncio.create_task(self._write(1_000_000 * writer)) for writer in range(1, count + 1)]

    async def stop(self) -> None:
        self._stopped.set()
        await asyncio.gather(*self._writers)

    async def _write(self, first: int) -> None:
        for number in itertools.count(first):
            if self._stopped.is_set():
                return
            try:
                await self._backend.put(block_of(number), number, self._unit, wait_s=60)
            except ConnectionLostError:
                pass  # no leader: the next one is tried
            else:
                say("stored", number)
            await asyncio.sleep(PAUSE_S)

    async def get(self, number: int) -> str:
        block, loop = block_of(number), asyncio.get_running_loop()
        deadline = loop.time() + LEADERLESS_S
        while True:
            try:
                read = BlockRead(self._unit, number, nbytes=block.nbytes)
                fetched = await self._backend.get([read], timeout_s=20)
                break
            except TransferQueueError as error:
                if not isinstance(error, ConnectionLostError) or loop.time() > deadline:
                    return type(error).__name__
                await asyncio.sleep(PAUSE_S)
        try:
            same = bytes(fetched.blocks[0].view.select(None, None).to_bytes()) == bytes(block.to_bytes())
        finally:
            fetched.release()
        return "same" if same else "other bytes"


async def main() -> None:
    settings, run, unit = json.loads(sys.argv[1]), sys.argv[2], msgspec.json.decode(sys.argv[3], type=UnitInfo)
    async with client(settings, run) as backend:
        blocks = Blocks(backend, unit)
        say("ready", None)
        while line := await asyncio.to_thread(sys.stdin.readline):
            method, *arguments = json.loads(line)
            if method == "write":
                blocks.write(*arguments)
            elif method == "stop":
                say("answer", await blocks.stop())
            else:
                say("answer", [await blocks.get(number) for number in arguments[0]])


if __name__ == "__main__":
    asyncio.run(main())
