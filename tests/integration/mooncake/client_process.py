"""A Mooncake client in a process of its own, driven by JSON lines: an engine keeps to the etcd it met first.

``python -m tests.integration.mooncake.client_process SETTINGS_JSON RUN UNIT_JSON`` takes ["put", number] and
["get", number] of blocks that all hold the same bytes. It prints ["ready", null], and ["answer", word] for each:
"stored", "same", "other bytes", or the name of what was raised.
"""

from __future__ import annotations

import asyncio
import json
import sys

import msgspec

from tests.integration.mooncake.conftest import MIB, block_of_bytes, client
from transfer_queue.errors import TransferQueueError
from transfer_queue.storage.base import BlockRead, UnitInfo
from transfer_queue.storage.mooncake.client import MooncakeBackend

BLOCK = block_of_bytes(MIB)


def say(*words: object) -> None:
    print(json.dumps(words), flush=True)


async def answer(backend: MooncakeBackend, unit: UnitInfo, method: str, number: int) -> str:
    try:
        if method == "put":
            await backend.put(BLOCK, number, unit, wait_s=60)
            return "stored"
        fetched = await backend.get([BlockRead(unit, number, nbytes=BLOCK.nbytes)], timeout_s=20)
    except TransferQueueError as error:
        return type(error).__name__
    try:
        same = bytes(fetched.blocks[0].view.select(None, None).to_bytes()) == bytes(BLOCK.to_bytes())
    finally:
        fetched.release()
    return "same" if same else "other bytes"


async def main() -> None:
    settings, run, unit = json.loads(sys.argv[1]), sys.argv[2], msgspec.json.decode(sys.argv[3], type=UnitInfo)
    async with client(settings, run) as backend:
        say("ready", None)
        while line := await asyncio.to_thread(sys.stdin.readline):
            say("answer", await answer(backend, unit, *json.loads(line)))


if __name__ == "__main__":
    asyncio.run(main())
