"""What strangers at a port cost those who are admitted."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from tests.waiting import until
from transfer_queue.runtime import gate as module
from transfer_queue.runtime.gate import Gate, Refusals, Stranger


def test_strangers_do_not_make_a_large_heap_be_searched_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[float] = []

    def search(pad: int) -> None:  # of a heap that takes 30 ms
        searches.append(time.monotonic())
        while time.monotonic() < searches[-1] + 0.03:
            pass

    async def strangers(gate: Gate, port: int) -> None:
        for _ in range(module._MANY_GONE):
            socket.create_connection(("127.0.0.1", port)).close()
        await until(lambda: gate._trimming is not None)

    async def scenario() -> None:
        async def opened(accepted: socket.socket, stranger: Stranger) -> None:
            accepted.close()
            gate.leave(stranger)

        gate = Gate(opened, Refusals(), patience_s=30, per_address=512, total=1024)
        port = gate.listen("127.0.0.1", 0)
        try:
            await strangers(gate, port)
            await until(lambda: bool(searches))
            await strangers(gate, port)
            assert gate._trimming is not None
            assert gate._trimming.when() - searches[0] >= 3
        finally:
            gate.close()

    monkeypatch.setattr(module, "_malloc_trim", search)
    asyncio.run(scenario())
