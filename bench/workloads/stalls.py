"""How long a small request waits at a controller of a million rows and 20,000 partitions while others list all keys,
look up all rows, save its state, scrape its metrics and watch its page, each without a pause.

A process of its own asks for one row every 2 ms, over a bare socket, and notes how long each answer took.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from bench.peers.queue import Queue
from bench.workloads import Row, Workload
from tests.integration.stack import ROOT, Stack
from transfer_queue import TransferQueueClient
from transfer_queue.client.operation import Operation
from transfer_queue.client.shards import engines_of
from transfer_queue.control.commands import Commit, Lookup
from transfer_queue.errors import ConnectionLostError
from transfer_queue.wire.frames import MAGIC
from transfer_queue.wire.messages import Capture, EndCapture, Envelope, Hello

_LIMIT = (
    "Client, scraper and page read and decode as fast as they can on the same {machine/cores} cores, beside the probe; "
    "the same probe beside idle peers sees {stalls/ours/idle}."
)
WORKLOAD = Workload(
    "Loop stalls",
    ("ours",),
    (
        Row("idle", "99.9th percentile of a lookup, alone", "ms", "lower", judged=False),
        Row("listing", "beside a listing of 1,000,000 keys", "ms", "lower", 20.0, judged=False, limit=_LIMIT),
        Row("scraping", "beside a scrape of /metrics", "ms", "lower", 20.0, judged=False, limit=_LIMIT),
        Row("watching", "beside the page's view of 20,000 partitions", "ms", "lower", 20.0, judged=False, limit=_LIMIT),
        Row("looking", "beside a lookup of 1,000,000 rows", "ms", "lower", 20.0, judged=False, limit=_LIMIT),
        Row("saving", "beside a checkpoint of its state", "ms", "lower", 20.0, judged=False, limit=_LIMIT),
        Row("all", "beside listing, scrape and page at once", "ms", "lower", 20.0, judged=False, limit=_LIMIT),
    ),
    repetitions=1,
)
PARTITIONS, ROWS = 20_000, 1_000_000
SECONDS = {"full": 8.0, "smoke": 2.0}
_HEAD = struct.Struct("<IIQ")


def _probe(address: str, seconds: float) -> float:
    """99.9th percentile of the milliseconds that an answer takes."""
    host, port = address.rsplit(":", 1)
    times = []
    with socket.create_connection((host, int(port)), timeout=60) as link, link.makefile("rb") as answers:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = 0

        def ask(body: Any) -> None:
            nonlocal number
            number += 1
            header = msgspec.msgpack.encode(Envelope(0, number, 0, body))
            link.sendall(_HEAD.pack(MAGIC, len(header), 0) + header)
            while True:
                _, size, _ = _HEAD.unpack(answers.read(_HEAD.size))
                kind, answered, *_ = msgspec.msgpack.decode(answers.read(size))
                if kind == 1 and answered == number:
                    return

        ask(Hello("client", "probe"))
        lookup = Lookup("small", keys=["key"], locate=False, fields=[])
        ask(lookup)
        end = time.monotonic() + seconds
        while (start := time.monotonic()) < end:
            ask(lookup)
            times.append(time.monotonic() - start)
            time.sleep(max(0.0, 0.002 - times[-1]))
    return sorted(times)[int(len(times) * 0.999)] * 1e3


def _fill(client: TransferQueueClient) -> None:
    async def commit(partition: str, keys: list[str]) -> None:
        await client.engine.put(None, Commit(partition, keys=keys, tags=[{"step": 1}] * len(keys)), timeout_s=60.0)

    async def work() -> None:
        await commit("small", ["key"])
        for start in range(0, ROWS - PARTITIONS, 20_000):
            await commit("large", [f"a-key-of-a-row-{number}" for number in range(start, start + 20_000)])
        for number in range(PARTITIONS):
            await commit(f"step-{number}", ["key"])

    client.run(Operation, work(), lambda _: None)


def _beside(works: list[Callable[[], object]], address: str, seconds: float) -> float:
    """What the probe sees while each of ``works`` is done again and again."""
    stop = threading.Event()

    def repeat(work: Callable[[], object]) -> None:
        while not stop.is_set():
            work()

    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        command = [sys.executable, "-m", "bench.workloads.stalls", address, str(seconds)]
        return float(json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def measure(peer: Queue, options: dict[str, Any]) -> dict[str, float]:
    stack = Stack(units=0)
    try:
        stack.start()
        client = TransferQueueClient("bench", stack.address)
        try:
            _fill(client)
            (engine,) = engines_of(client.engine)

            def get(path: str) -> None:
                with urllib.request.urlopen(f"http://{stack.controller.ready['metrics']}{path}", timeout=60) as answer:
                    answer.read()

            def listing() -> None:
                client.run(client.kv.list_keys, "large")

            def save() -> None:
                with suppress(ConnectionLostError):  # this stack gives silent clients 3 s
                    for step in (Capture(), EndCapture()):
                        client.run(Operation, engine.transfer(step, (), 60.0), lambda _: None)

            works: dict[str, list[Callable[[], object]]] = {
                "idle": [],
                "listing": [listing],
                "scraping": [lambda: get("/metrics")],
                "watching": [lambda: get("/api/dataflow")],
            }
            works["all"] = [work for of in works.values() for work in of]
            looking = Lookup("large", fields=[])
            works["looking"] = [lambda: client.run(Operation, engine.lookup(looking, 60.0), lambda _: None)]
            works["saving"] = [save]
            seconds = SECONDS[options["scale"]]
            return {name: _beside(work, stack.address, seconds) for name, work in works.items()}
        finally:
            client.close()
    finally:
        stack.stop()


if __name__ == "__main__":
    print(json.dumps(_probe(sys.argv[1], float(sys.argv[2]))))
