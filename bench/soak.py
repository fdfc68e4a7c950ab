"""Full rate for minutes: ``python -m bench.soak [--minutes 10]``. Exit status 1 if a byte is wrong or something grows.

With ``--share 0.2`` at a modest rate instead: all processes together use about a fifth of one core, rows have 1 KB to
64 MB, and the memory of each process is printed for every minute: for clients without what they keep for their next
batches, which is bounded by 1 GiB and depends on which sizes of batches came lately.

Starts a controller and two storage units on this machine. Writers put rows, overwrite them, clear some and start again;
readers get random rows as copies; slow readers hold views of them and look at them again before they let go. The
contents of a row follow from its writer, key and version, so that every reader can check all bytes. Meanwhile memory
and descriptors of all processes are sampled, and a large block must find room in the arenas every few seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import psutil
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from bench.clients import own_bytes
from transfer_queue.columns.recycling import MEMORY
from transfer_queue.errors import CapacityError, KeyNotFoundError, NotReadyError, StorageKeyNotFoundError
from transfer_queue.launch.local import LocalStack, default_plan

UNIT_BYTES = 512 << 20
PROBE_BYTES = UNIT_BYTES // 8
KEYS = 128
WRITERS = 2
WIDTHS = (16, 256, 2048)
"""Elements of the dense field, 8 bytes each; one of these a put."""
LARGE_WIDTHS = (128, 4096, 1 << 17, 1 << 20, 1 << 23)
"""The same for a run at a modest rate: rows of 1 KB to 64 MB."""
MOST_BYTES = 64 << 20
"""Of a put."""
FEW_KEYS = 3
"""So many keys of a writer have the rows of 1 MB and more, so that the arenas never fill up for long."""
GROWTH = 0.02
MINUTE = 120
"""Samples of a minute."""
SLACK_BYTES = 2 << 20
"""Of each process: what an allocator may take or give back from one second to the next."""


class Pace:
    """Keeps a process to a share of one core, in between its operations."""

    def __init__(self, stop: Event, share: float = 0.0, kept: Any = None) -> None:
        self.stop = stop
        self.kept = kept
        """A shared number: bytes of freed batches that this process keeps for the next ones, 1 GiB at most."""
        self.share = share
        """0: no limit."""
        self.widths = LARGE_WIDTHS if share else WIDTHS
        self._used, self._since = time.process_time(), time.monotonic()

    def goes_on(self) -> bool:
        """Wait until the process has used less than its share, or is told to stop."""
        if self.kept is not None:
            self.kept.value = MEMORY.idle_bytes
        if self.share:
            due = self._since + (time.process_time() - self._used) / self.share
            self.stop.wait(max(0.0, due - time.monotonic()))
        return not self.stop.is_set()

    def width_and_keys(self, chance: random.Random) -> tuple[int, list[int]]:
        """What a put has: the width of its rows and their keys."""
        width = chance.choice(self.widths)
        count = min(chance.choice((1, 8, 64)), MOST_BYTES // (8 * width))
        large = width >= 1 << 17
        return width, sorted(
            chance.sample(range(FEW_KEYS if large else KEYS), min(count, FEW_KEYS) if large else count)
        )

    def keys(self, chance: random.Random) -> list[int]:
        """What a get asks for."""
        if self.share and chance.random() < 0.5:
            return chance.sample(range(FEW_KEYS), chance.choice((1, 2)))
        return chance.sample(range(KEYS), chance.choice((1, 4, 16)))


Role = Callable[[int, Pace], Counter[str]]


def rows_of(writer: int, keys: list[int], version: int, width: int) -> TensorDict:
    """What a writer puts under ``keys``: every element tells writer, key and version."""
    seeds = [(writer << 40) + (key << 32) + version for key in keys]
    lengths = [1 + seed % 509 for seed in seeds]
    ragged = torch.cat([torch.arange(seed, seed + length) for seed, length in zip(seeds, lengths, strict=True)])
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    fields: dict[str, Any] = {
        "seed": torch.tensor(seeds),
        "dense": torch.tensor(seeds)[:, None] + torch.arange(width),
        "ragged": torch.nested.nested_tensor_from_jagged(ragged, offsets),
        "text": NonTensorStack(*[f"{seed:x}" * (seed % 7) for seed in seeds]),
    }
    return TensorDict(fields, batch_size=[len(keys)])


def wrong_rows(batch: TensorDict, writer: int, keys: list[int]) -> int:
    """How many rows are not what ``rows_of`` makes for their writer and key and some one version."""
    wrong = 0
    dense, ragged, texts = batch["dense"].unbind(), batch["ragged"].unbind(), batch["text"].tolist()
    for number, (key, seed) in enumerate(zip(keys, batch["seed"].tolist(), strict=True)):
        width = len(dense[number])
        good = (
            seed >> 32 == (writer << 8) + key
            and width in WIDTHS + LARGE_WIDTHS
            and torch.equal(dense[number], torch.arange(seed, seed + width))
            and torch.equal(ragged[number], torch.arange(seed, seed + 1 + seed % 509))
            and texts[number] == f"{seed:x}" * (seed % 7)
        )
        wrong += not good
    return wrong


def write(writer: int, pace: Pace) -> Counter[str]:
    """Put, overwrite and clear the rows of one partition until it is told to stop."""
    chance, count, version = random.Random(writer), Counter[str](), 0
    partition = f"writer{writer}"
    while pace.goes_on():
        version += 1
        width, keys = pace.width_and_keys(chance)
        batch = rows_of(writer, keys, version, width)
        try:
            tq.kv_batch_put([f"k{key}" for key in keys], partition, batch)
        except CapacityError:  # what slow readers hold takes room; it comes back
            count["refused"] += 1
            continue
        count["puts"] += 1
        count["bytes"] += int(batch["dense"].nbytes)
        del batch
        if chance.random() < 0.2:
            tq.kv_clear([f"k{key}" for key in keys[::2]], partition)
            count["clears"] += 1
        if chance.random() < 0.01:
            tq.get_client().clear_partition(partition)
            count["partition clears"] += 1
    return count


def _read(number: int, pace: Pace, hold_s: float) -> Counter[str]:
    chance, count = random.Random(1000 + number), Counter[str]()
    while pace.goes_on():
        writer = chance.randrange(WRITERS)
        keys = pace.keys(chance)
        try:
            batch = tq.kv_batch_get([f"k{key}" for key in keys], f"writer{writer}", zero_copy=hold_s > 0)
        except (KeyNotFoundError, StorageKeyNotFoundError, NotReadyError):  # cleared, or not put yet
            count["absent"] += 1
            continue
        count["gets"] += 1
        count["wrong"] += wrong_rows(batch, writer, keys)
        if hold_s:
            pace.stop.wait(hold_s)
            count["wrong"] += wrong_rows(batch, writer, keys)
        del batch
    return count


def read(number: int, pace: Pace) -> Counter[str]:
    """Get copies and check them."""
    return _read(number, pace, 0.0)


def read_slowly(number: int, pace: Pace) -> Counter[str]:
    """Get views, check them, hold them while their rows are overwritten and cleared, and check them again."""
    return _read(number, pace, 0.2)


def work(address: str, role: Role, number: int, stop: Event, pipe: Pipe, share: float, kept: Any) -> None:
    torch.set_num_threads(1)
    tq.init({"controller": {"addresses": [address]}})
    try:
        rows_of(number, [0], 0, WIDTHS[0])  # imports what torch loads on first use
        pipe.send("ready")
        pipe.send(dict(role(number, Pace(stop, share, kept))))
    finally:
        tq.close()


def probe() -> None:
    """Put, get and clear a block of an eighth of a unit. Raises CapacityError if the arenas are too fragmented."""
    data = torch.arange(PROBE_BYTES // 8).view(1, -1)
    tq.kv_batch_put(["probe"], "probe", TensorDict({"x": data}, batch_size=[1]))
    back = tq.kv_batch_get(["probe"], "probe", zero_copy=True)["x"].unbind()[0]
    if not torch.equal(back, data[0]):
        raise SystemExit("the large block came back with other bytes")
    tq.get_client().clear_partition("probe")


def used_bytes(stack: LocalStack) -> int:
    """What the units hold, as they last reported to the controller."""
    with urllib.request.urlopen(f"http://{stack.processes[0].address['metrics']}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("tq_unit_used_bytes")))


def watch(
    processes: dict[str, psutil.Process], kept: dict[str, Any], seconds: float, every_s: float
) -> dict[str, list[tuple[int, int]]]:
    """(own bytes without ``kept`` ones, descriptors) of each process, every half second; probes every ``every_s``
    seconds.

    Prints the medians of each minute."""
    samples: dict[str, list[tuple[int, int]]] = {name: [] for name in processes}
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        time.sleep(0.5)
        if number % (2 * every_s) == 0:
            probe()
        number += 1
        for name, process in processes.items():
            used = own_bytes(process) - (kept[name].value if name in kept else 0)
            samples[name].append((used, process.num_fds()))
        if number % MINUTE == 0:
            print(
                json.dumps(
                    {"minute": number // MINUTE, **{name: _median(of[-MINUTE:]) for name, of in samples.items()}}
                )
            )
            sys.stdout.flush()
    return samples


def _median(samples: list[tuple[int, int]]) -> float:
    """Megabytes."""
    return round(statistics.median(nbytes for nbytes, _ in samples) / 1e6, 1)


def faults(samples: dict[str, list[tuple[int, int]]], strict: bool, clients_slack: int = 0) -> list[str]:
    """What grew from the second fifth of the run, when all is warm, to the last. Without ``strict`` the run was too
    short to tell memory that is still being taken into use from memory that is lost: four times as much is let pass.

    ``clients_slack``: bytes by which the buffers that a client keeps for its next batches may differ.
    """
    found = []
    for name, values in samples.items():
        fifth = max(1, len(values) // 5)
        early, late = values[fifth : 2 * fifth], values[-fifth:]
        before, after = (statistics.median(nbytes for nbytes, _ in part) for part in (early, late))
        allowed = (before * GROWTH + SLACK_BYTES) * (1 if strict else 4)
        if not name.startswith(("controller", "storage")):
            allowed += clients_slack
        if after - before > allowed:
            found.append(f"{name} grew from {before / 1e6:.1f} to {after / 1e6:.1f} MB")
        files = [max(count for _, count in part) for part in (early, late)]
        if files[1] > files[0] + 1:  # a scrape of the metrics, or a file that is just being read
            found.append(f"{name} had {files[0]} descriptors and has {files[1]}")
    return found


def soak(seconds: float, share: float = 0.0) -> dict[str, Any]:
    """Counts of what was done, memory of each process, and ``faults``: empty if all is well.

    ``share``: of one core, for all processes together; 0 for no limit.
    """
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    roles: list[tuple[Role, int]] = [(write, number) for number in range(WRITERS)]
    roles += [(read, 0), (read, 1), (read_slowly, 0)]
    with LocalStack(default_plan(units=2, unit_capacity=UNIT_BYTES)).start() as stack:
        processes = {process.name: psutil.Process(process.pid) for process in stack.processes if process.pid}
        pipes, kept = [], {}
        for role, number in roles:
            mine, theirs = context.Pipe(False)
            own = kept[f"{role.__name__}-{number}"] = context.Value("q", 0)
            arguments = (stack.controller_address, role, number, stop, theirs, 0.75 * share / len(roles), own)
            worker = context.Process(target=work, args=arguments, daemon=True)
            worker.start()
            assert worker.pid is not None
            processes[f"{role.__name__}-{number}"] = psutil.Process(worker.pid)
            pipes.append(mine)
        tq.init({"controller": {"addresses": [stack.controller_address]}})
        try:
            for pipe in pipes:
                pipe.recv()
            samples = watch(processes, kept, seconds, 60 if share else 5)
            stop.set()
            count = sum((Counter(pipe.recv()) for pipe in pipes), Counter[str]())
            for partition in tq.get_client().get_partition_list():
                tq.get_client().clear_partition(partition)
            deadline = time.monotonic() + 60
            while (left := used_bytes(stack)) and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            stop.set()
            tq.close()
    found = faults(samples, seconds >= 120, 2 * MOST_BYTES if share else 0)
    found += [f"{count['wrong']} rows came back with wrong bytes"] if count["wrong"] else []
    found += [f"{left} bytes are in use after all was cleared"] if left else []
    found += ["nothing was read"] if not count["gets"] else []
    memory = {
        name: [round(values[at][0] / 1e6, 1) for at in (len(values) // 5, len(values) * 3 // 5, -1)]
        for name, values in samples.items()
    }
    files = {name: [values[len(values) // 5][1], values[-1][1]] for name, values in samples.items()}
    return {"seconds": seconds, "done": count, "megabytes": memory, "descriptors": files, "faults": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--share", type=float, default=0.0, help="of one core, for all processes; 0: full rate")
    options = parser.parse_args()
    result = soak(options.minutes * 60, options.share)
    print(json.dumps(result, indent=1))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
