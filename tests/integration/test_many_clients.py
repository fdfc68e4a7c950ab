"""Hundreds of clients of one queue: what each costs the servers, and how they come back after a restart."""

from __future__ import annotations

import asyncio
import json
import threading

import psutil

from bench.clients import attach_all, one_turn, own_bytes
from tests.integration.stack import Stack, running_stack
from tests.waiting import wait_until
from transfer_queue.control.commands import ListPartitions

CLIENTS = 200


def descriptors(stack: Stack) -> list[int]:
    return [psutil.Process(server.process.pid).num_fds() for server in [stack.controller, *stack.units]]


def memory(stack: Stack) -> int:
    return sum(own_bytes(psutil.Process(server.process.pid)) for server in [stack.controller, *stack.units])


async def test_many_clients_work_at_once_and_leave_nothing_behind() -> None:
    with running_stack(units=2, settings={"sharedMemory": False}) as stack:
        files, resident, threads = descriptors(stack), memory(stack), threading.active_count()
        engines = await attach_all(stack.address, range(CLIENTS))
        for turn in range(2):
            await asyncio.gather(*(one_turn(engine, number, turn) for number, engine in enumerate(engines)))
        assert threading.active_count() <= threads + 2
        assert memory(stack) - resident < CLIENTS * 3 * 64_000  # a controller and two units
        await asyncio.gather(*(engine.close() for engine in engines))
        wait_until(lambda: descriptors(stack) == files, "the connections are closed at the servers too")


async def test_all_clients_come_back_after_the_controller_was_restarted() -> None:
    with running_stack(units=1, settings={"sharedMemory": False}) as stack:
        engines = await attach_all(stack.address, range(CLIENTS))
        config = json.loads(stack.controller.path.read_text())
        config["port"] = int(stack.address.rsplit(":", 1)[1])
        stack.controller.path.write_text(json.dumps(config))
        stack.controller.kill()
        stack.controller.spawn()
        stack.controller.wait_ready()
        await asyncio.gather(*(engine.request(ListPartitions(""), 60.0) for engine in engines))
        await asyncio.gather(*(one_turn(engine, number, 0) for number, engine in enumerate(engines)))
        await asyncio.gather(*(engine.close() for engine in engines))
