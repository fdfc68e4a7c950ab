"""Puts and gets in partitions of both shards of a queue, a thread for each shard, until the file /tmp/stop is there.

Prints "SHARD TURN" behind each turn: a row put and read back in every partition, byte for byte, beside the first row of
that partition, which stays. At the end a line of JSON: of each shard its turns and the longest of them, and how many
turns of shard 0 ended while shard 1 was at its longest.
"""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.control.directory import shard_of
from transfer_queue.errors import ConnectionLostError, WaitTimeoutError

SHARDS, PARTITIONS, KEPT = 2, 4, 8
WIDTH = 1024
PAUSE_S = 0.05
STOP = Path("/tmp/stop")


def row(partition: str, number: int) -> torch.Tensor:
    """What is put there as the turn ``number``."""
    return torch.arange(WIDTH, dtype=torch.int32) + 1000 * number + sum(partition.encode())


def put(partition: str, key: str, number: int) -> None:
    rows = TensorDict({"x": row(partition, number)[None]}, batch_size=[1])
    tq.kv_batch_put(keys=[key], partition_id=partition, fields=rows)


def take_turn(partition: str, turn: int) -> None:
    key = str(turn % KEPT)
    put(partition, key, turn)
    found = tq.kv_batch_get(["first", key], partition)["x"]
    for number, values in zip((0, turn), found, strict=True):
        if not torch.equal(values, row(partition, number)):
            raise SystemExit(f"{partition}, turn {number}: other bytes than were put")


def work(shard: int) -> list[tuple[float, float]]:
    """Begin and end of each turn."""
    names = (f"{socket.gethostname()}-{number}" for number in count())
    own = [next(name for name in names if shard_of(name, SHARDS) == shard) for _ in range(PARTITIONS)]
    for partition in own:
        put(partition, "first", 0)
    turns: list[tuple[float, float]] = []
    while not STOP.exists():
        began = time.monotonic()
        for partition in own:
            while True:
                try:
                    take_turn(partition, len(turns) + 1)
                    break
                except (ConnectionLostError, WaitTimeoutError) as error:
                    print(f"{partition}: {error}\n", end="", flush=True)
        turns.append((began, time.monotonic()))
        print(f"{shard} {len(turns)}\n", end="", flush=True)  # at once, as the other thread prints too
        time.sleep(PAUSE_S)
    return turns


def main() -> None:
    torch.set_num_threads(1)
    tq.init()
    with ThreadPoolExecutor(SHARDS) as pool:
        turns = list(pool.map(work, range(SHARDS)))
    tq.close()
    longest = [max(each, key=lambda turn: turn[1] - turn[0]) for each in turns]
    began, ended = longest[1]
    report = {
        "turns": [len(each) for each in turns],
        "longest_s": [round(end - begin, 2) for begin, end in longest],
        "meanwhile": sum(began < end < ended for _, end in turns[0]),
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
