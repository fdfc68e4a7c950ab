"""Many clients of one queue: ``python -m bench.clients [--clients 8192] [--processes 4] [--shards 4]``.

Starts a controller, or several, and storage units on this machine. Each client is an engine of its own, with its own
connections to the controllers and to the units it uses, over TCP; all clients of a process share its one I/O loop. Each
puts a row (1 KB, or ``--row-kb``) into one of 64 partitions and gets it back, again and again, all at once, and checks
the bytes. Prints one JSON object: connections, operations per second, resident bytes of the servers and of the client
processes for each client.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import gc
import itertools
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np
import psutil

from transfer_queue.client.shards import QueueEngine, attach, engines_of
from transfer_queue.columns.block import EncodedBlock
from transfer_queue.columns.column import ColumnView
from transfer_queue.control.commands import Commit, Lookup
from transfer_queue.control.schema import FieldSchema
from transfer_queue.launch.local import LocalStack, default_plan
from transfer_queue.runtime.process import allow_descriptors, new_event_loop

OPENING = 256
"""Clients that attach at the same moment."""
TIMEOUT_S = 300.0
SPARE_DESCRIPTORS = 512
PARTITIONS = 64


def own_bytes(process: psutil.Process) -> int:
    """Resident bytes that are not shared with others: without the arena, which grows to its size in the background."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """What they have used so far, all together."""
    return float(sum(times.user + times.system for times in (process.cpu_times() for process in processes)))


async def run_copy(function: Any) -> Any:
    return function()


def row(number: int, turn: int, kilobytes: int) -> EncodedBlock:
    """Numbers that no other client and turn has."""
    values = np.full(kilobytes * 128, number * 1_000_003 + turn, np.int64)
    schema = FieldSchema("x", "dense", "int64", (kilobytes * 128,))
    return EncodedBlock(1, [ColumnView(schema, 1, [values.view(np.uint8)], None)])


async def one_turn(engine: QueueEngine, number: int, turn: int, kilobytes: int = 1) -> None:
    partition, key = f"clients{number % PARTITIONS}", f"k{number}"
    block = row(number, turn, kilobytes)
    await engine.put(block, Commit(partition, keys=[key], wait_s=TIMEOUT_S), timeout_s=TIMEOUT_S)
    lookup = Lookup(partition, keys=[key], require_ready=True)
    loaded = await engine.load(await engine.lookup(lookup, TIMEOUT_S), ["x"], lookup, TIMEOUT_S)
    try:
        if loaded.column_bytes("x") != block.column("x").values.tobytes():
            raise SystemExit(f"client {number} got other bytes than it put in turn {turn}")
    finally:
        loaded.release()


async def attach_all(address: str, numbers: range) -> list[QueueEngine]:
    engines: list[QueueEngine] = []
    for start in range(0, len(numbers), OPENING):
        some = numbers[start : start + OPENING]
        engines += await asyncio.gather(
            *(attach([address], f"client{number}", run_copy, None, TIMEOUT_S) for number in some)
        )
    return engines


async def clients(address: str, numbers: range, turns: int, kilobytes: int, pipe: Pipe) -> None:
    """One process's share. Talks to the parent between the phases, so that all processes work at the same time."""
    loop = asyncio.get_running_loop()
    waiting = concurrent.futures.ThreadPoolExecutor(1)
    await loop.run_in_executor(waiting, int)  # its thread is there before threads are counted

    async def phase(report: Any) -> None:
        pipe.send(report)
        await loop.run_in_executor(waiting, pipe.recv)

    before, threads = own_bytes(psutil.Process()), psutil.Process().num_threads()
    engines = await attach_all(address, numbers)
    members = list(zip(engines, numbers, strict=True))
    await asyncio.gather(*(one_turn(engine, number, -1, kilobytes) for engine, number in members))
    sockets = sum(len(part.descriptors()) for engine in engines for part in engines_of(engine))
    await phase({"sockets": sockets, "rss": own_bytes(psutil.Process()) - before})

    gc.freeze()  # no process of a user holds a thousand clients to look through

    async def work(engine: QueueEngine, number: int) -> None:
        for turn in range(turns):
            await one_turn(engine, number, turn, kilobytes)

    start = time.perf_counter()
    await asyncio.gather(*(work(engine, number) for engine, number in members))
    seconds = time.perf_counter() - start
    # The loop that serves the clients is this process's main thread, and a thread of the library in a user's process.
    await phase({"seconds": seconds, "threads": psutil.Process().num_threads() - threads + 1})
    for engine in engines:
        await engine.close()


def client_process(address: str, numbers: range, turns: int, kilobytes: int, pipe: Pipe) -> None:
    allow_descriptors()
    loop = new_event_loop()
    loop.run_until_complete(clients(address, numbers, turns, kilobytes, pipe))
    loop.close()


def measure(
    count: int, processes: int, turns: int, kilobytes: int = 1, units: int = 2, shards: int = 1
) -> dict[str, Any]:
    """Raises SystemExit if this process may not open as many files as the clients need."""
    limit = allow_descriptors()
    if count * shards + SPARE_DESCRIPTORS > limit:
        sys.exit(f"{count} clients need more than the {limit} open files that are allowed here (ulimit -Hn)")
    room = 3 * count * kilobytes * 1024 // units  # rows are overwritten: an old and a new one, and one under way
    plan = default_plan(units=units, unit_capacity=max(2**30, room), shards=shards)
    plan = plan.with_backend_settings({"sharedMemory": False})
    stack = LocalStack(plan).start()
    context = multiprocessing.get_context("spawn")
    workers = []
    try:
        servers = {process.name: psutil.Process(process.pid) for process in stack.processes if process.pid}
        before = {name: own_bytes(process) for name, process in servers.items()}
        running = list(servers.values())
        bounds = [count * number // processes for number in range(processes + 1)]
        pipes = []
        for start, stop in itertools.pairwise(bounds):
            mine, theirs = context.Pipe()
            arguments = (stack.controller_address, range(start, stop), turns, kilobytes, theirs)
            workers.append(context.Process(target=client_process, args=arguments, daemon=True))
            workers[-1].start()
            running.append(psutil.Process(workers[-1].pid))
            theirs.close()
            pipes.append(mine)
        attached = [pipe.recv() for pipe in pipes]
        after = {name: own_bytes(process) for name, process in servers.items()}
        busy = cpu_seconds(running)
        for pipe in pipes:
            pipe.send("work")
        worked = [pipe.recv() for pipe in pipes]
        busy = cpu_seconds(running) - busy
        for pipe in pipes:
            pipe.send("close")
        for worker in workers:
            worker.join(TIMEOUT_S)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
        stack.stop()
    return {
        "clients": count,
        "processes": processes,
        "connections": sum(report["sockets"] for report in attached),
        "operations_per_s": round(2 * count * turns / max(report["seconds"] for report in worked)),
        "cpu_us_per_operation": round(busy / (2 * count * turns) * 1e6),
        "gigabytes_put_and_got": round(2 * count * turns * kilobytes * 1024 / 1e9, 1),
        "seconds": round(max(report["seconds"] for report in worked), 1),
        "threads": max(report["threads"] for report in worked),
        "server_bytes_per_client": {name: round((after[name] - before[name]) / count) for name in servers},
        "client_bytes_per_client": round(sum(report["rss"] for report in attached) / count),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--row-kb", type=int, default=1)
    parser.add_argument("--units", type=int, default=2)
    parser.add_argument("--shards", type=int, default=1)
    given = parser.parse_args()
    found = measure(given.clients, given.processes, given.turns, given.row_kb, given.units, given.shards)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
