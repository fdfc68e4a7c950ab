"""Calls that need a storage unit that does not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from transfer_queue.columns.encoding import encode
from transfer_queue.errors import ConnectionLostError, TransferQueueError, WaitTimeoutError
from transfer_queue.storage.base import BackendContext
from transfer_queue.storage.memory.client import MemoryBackend
from transfer_queue.wire.messages import UnitInfo

UNIT = UnitInfo(0, "unit", "127.0.0.1:1", 1 << 20)


async def _puts(backend: MemoryBackend) -> list[asyncio.Task[Any]]:
    block = encode({"x": torch.ones(1)}, rows=1, allow_pickle=False)
    puts = [asyncio.create_task(backend.put(block, number, UNIT, wait_s=0)) for number in range(8)]
    for _ in range(5):
        await asyncio.sleep(0)  # all of them wait
    return puts


@pytest.mark.parametrize("ends", ["no answer", "closed"])
def test_calls_share_one_attempt_to_connect_and_its_outcome(ends: str) -> None:
    async def run() -> None:
        dialed: list[asyncio.Future[Any]] = []

        def connect(address: str) -> asyncio.Future[Any]:
            dialed.append(asyncio.get_running_loop().create_future())
            return dialed[-1]

        backend = MemoryBackend(BackendContext("c", 1, "run", {}, connect, None, "", {}))  # type: ignore[arg-type]
        for attempt in (1, 2):
            puts = await _puts(backend)
            assert len(dialed) == attempt
            puts[0].cancel()  # the call that began the attempt does not end it
            await asyncio.sleep(0)
            if ends == "closed":
                await backend.close()
            else:
                dialed[-1].set_exception(WaitTimeoutError("no answer to Hello"))
            kind: type[TransferQueueError] = ConnectionLostError if ends == "closed" else WaitTimeoutError
            outcomes = await asyncio.gather(*puts, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, *[kind] * 7]
            if ends == "closed":
                return

    asyncio.run(asyncio.wait_for(run(), 30))
