"""What was read for a caller that has given up, or that gets an error instead, is released."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pytest

from transfer_queue.client.io import IoThread
from transfer_queue.client.operation import Operation, carry_out
from transfer_queue.client.options import ClientOptions
from transfer_queue.client.reading import LoadedBatch, LoadedBatches, ReadPlan
from transfer_queue.client.rows import EMPTY, RowOperations
from transfer_queue.client.twins import blocking
from transfer_queue.control.commands import Lookup
from transfer_queue.control.schema import FieldSchema
from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.metadata import BatchMeta, describe_fields
from transfer_queue.storage import base


class Fetched(base.Fetched):
    """Memory that ``released`` tells the release of."""

    def __init__(self, nbytes: int = 0) -> None:
        self.blocks = [cast(Any, _Block(_View(nbytes)))]
        self.released = threading.Event()

    def release(self) -> None:
        self.released.set()


class _View:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class _Block:
    def __init__(self, view: _View) -> None:
        self.view = view


def loaded(fetched: Fetched) -> LoadedBatch:
    return LoadedBatch(EMPTY, [], ReadPlan([], [], []), fetched)


@pytest.fixture
def io() -> Any:
    thread = IoThread()
    yield thread
    thread.stop()


async def test_a_result_that_comes_together_with_the_cancellation_of_its_caller_is_released(io: IoThread) -> None:
    fetched, ended = Fetched(), threading.Event()

    async def work() -> LoadedBatch:
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, ended.set)
        return loaded(fetched)

    operation = Operation(work(), lambda batch: None, drop=LoadedBatch.release)
    running = asyncio.ensure_future(carry_out(io, operation))
    await asyncio.sleep(0)
    assert ended.wait(5.0)  # it is on its way to this loop, which does not run meanwhile
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert fetched.released.wait(5.0)


async def test_a_batch_whose_decoding_is_given_up_before_it_began_is_released(
    io: IoThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, run_copy = Fetched(1 << 30), io.run_copy

    async def work() -> LoadedBatch:
        return loaded(fetched)

    def giving_up(function: Any) -> Any:
        running.cancel()
        return run_copy(function)

    monkeypatch.setattr(io, "run_copy", giving_up)
    running = asyncio.ensure_future(carry_out(io, Operation(work(), lambda batch: None, drop=LoadedBatch.release)))
    with suppress(asyncio.CancelledError):
        await running
    assert fetched.released.wait(5.0)


def test_a_result_that_comes_together_with_an_interrupt_is_released(
    io: IoThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = Fetched()

    async def work() -> LoadedBatch:
        return loaded(fetched)

    real = threading.Lock

    class Interrupted:
        def __init__(self) -> None:
            self.lock = real()

        def acquire(self, timeout: float | None = None) -> bool:
            self.lock.acquire(timeout=5.0)
            if timeout is not None:
                raise KeyboardInterrupt
            return True

        def release(self) -> None:
            self.lock.release()

    monkeypatch.setattr("transfer_queue.client.io.threading.Lock", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        blocking(carry_out)(io, Operation(work(), lambda batch: None, drop=LoadedBatch.release))
    assert fetched.released.wait(5.0)


async def test_of_rows_of_two_partitions_the_first_are_released_where_the_second_are_gone() -> None:
    fetched = Fetched()

    class Engine:
        async def find(self, command: Lookup, *_: Any) -> LoadedBatch:
            if command.partition == "gone":
                raise StorageKeyNotFoundError("its rows were cleared")
            return loaded(fetched)

    schema = describe_fields([FieldSchema("x", "dense", "uint8", (1,))], 2)
    metadata = BatchMeta([0, 1], ["here", "gone"], schema)
    with pytest.raises(StorageKeyNotFoundError):
        await RowOperations(cast(Any, Engine()), ClientOptions(), cast(Any, None)).get_data(metadata).work
    assert fetched.released.is_set()


@pytest.mark.parametrize("several", [lambda batch: batch, lambda batch: LoadedBatches([(np.arange(0), batch)])])
async def test_a_long_decoding_does_not_hold_up_the_loop_that_awaits_it(
    io: IoThread, several: Callable[[LoadedBatch], Any]
) -> None:
    decoded_in: list[threading.Thread] = []

    async def work() -> Any:
        return several(loaded(Fetched(1 << 30)))

    await carry_out(io, Operation(work(), lambda batch: decoded_in.append(threading.current_thread())))
    assert decoded_in != [threading.current_thread()]
