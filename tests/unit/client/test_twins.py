"""Blocking twins in a running event loop."""

from __future__ import annotations

import asyncio

import pytest

from transfer_queue.client.twins import blocking


async def async_count() -> int:
    return 3


def test_a_blocking_call_in_an_event_loop_is_told_once_with_its_awaitable_twin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    count = blocking(async_count)

    async def program() -> list[int]:
        return [count(), count(), await async_count()]

    assert (count(), caplog.records) == (3, [])
    assert asyncio.run(program()) == [3, 3, 3]
    told = [record.getMessage() for record in caplog.records]
    assert told == ["count blocks the running event loop and all its tasks; use await async_count"]
