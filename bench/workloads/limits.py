"""What the machine itself gives: copies, TCP on loopback, encryption, and a message to another process and back."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np

from bench import tls
from bench.peers.base import Peer
from bench.workloads import Row, Workload
from transfer_queue.runtime.process import new_event_loop

WORKLOAD = Workload(
    "Limits of this machine",
    ("machine",),
    (
        Row("memcpy", "copy of 302 MB into warm memory, one thread", "GB/s", "higher"),
        Row("fresh", "copy of 302 MB into new memory, one thread", "GB/s", "higher"),
        Row("tcp", "TCP on loopback, one connection of blocking sockets", "GB/s", "higher"),
        Row("tcp_cpu", "CPU of it, both sides together", "ms/GB", "lower"),
        Row("tls", "the same with TLS 1.3", "GB/s", "higher"),
        Row("tls_cpu", "CPU of it with TLS, both sides together", "ms/GB", "lower"),
        Row("cipher", "AES-256-GCM alone, CPU of one side", "ms/GB", "lower"),
        Row("round_trip_p50", "1 KB to another process and back, asyncio, p50", "ms", "lower"),
        Row("round_trip_p99", "1 KB to another process and back, asyncio, p99", "ms", "lower"),
        Row("call_p50", "the same, called from another thread, p50", "ms", "lower"),
        Row("call_p99", "the same, called from another thread, p99", "ms", "lower"),
    ),
    repetitions=3,
    ours="machine",
)
NBYTES = 302 * 10**6
MESSAGE = bytes(1024)


def _copies() -> dict[str, float]:
    source, warm = np.ones(NBYTES, np.uint8), np.ones(NBYTES, np.uint8)
    start = time.perf_counter()
    np.copyto(warm, source)
    between = time.perf_counter()
    fresh = source.copy()
    end = time.perf_counter()
    del fresh
    return {"memcpy": NBYTES / (between - start) / 1e9, "fresh": NBYTES / (end - between) / 1e9}


def _streams(messages: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        plain = tls.sockets(None, messages)
        sealed = tls.sockets(tls.certificate(Path(folder)), messages)
    return {
        "tcp": plain[0],
        "tcp_cpu": plain[1] + plain[2],
        "tls": sealed[0],
        "tls_cpu": sealed[1] + sealed[2],
        "cipher": tls.cipher(messages),
    }


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class _Caller(asyncio.Protocol):
    """Sends a message and waits until as many bytes are back."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        if not self._left:
            self._back.set_result(None)

    async def call(self) -> None:
        self._left, self._back = len(MESSAGE), asyncio.get_running_loop().create_future()
        self._transport.write(MESSAGE)
        await self._back


def _echo(pipe: Pipe) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(_Echo, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await loop.run_in_executor(None, pipe.recv)

    new_event_loop().run_until_complete(run())


def _percentiles(call: Callable[[], object], count: int) -> tuple[float, float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times), sorted(times)[int(count * 0.99)]


def _messages(count: int) -> dict[str, float]:
    mine, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_echo, args=(theirs,))
    child.start()
    port = mine.recv()
    loop = new_event_loop()
    _, caller = loop.run_until_complete(loop.create_connection(_Caller, "127.0.0.1", port))
    alone = _percentiles(lambda: loop.run_until_complete(caller.call()), count)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    called = _percentiles(lambda: asyncio.run_coroutine_threadsafe(caller.call(), loop).result(), count)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    mine.send(None)
    child.join()
    return {
        "round_trip_p50": alone[0],
        "round_trip_p99": alone[1],
        "call_p50": called[0],
        "call_p99": called[1],
    }


def measure(peer: Peer, options: dict[str, Any]) -> dict[str, float]:
    full = options["scale"] == "full"
    return {**_messages(2000 if full else 100), **_streams(15 if full else 1), **_copies()}
