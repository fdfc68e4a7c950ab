"""Full rate for minutes: ``python -m bench.soak [--minutes 10]``. Exit status 1 if a byte is wrong or something grows.

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
from transfer_queue.errors import CapacityError, KeyNotFoundError, NotReadyError, StorageKeyNotFoundError
from transfer_queue.launch.local import LocalStack, default_plan

UNIT_BYTES = 512 << 20
PROBE_BYTES = UNIT_BYTES // 8
KEYS = 128
WRITERS = 2
WIDTHS = (16, 256, 2048)
"""Elements of the dense field, 8 bytes each; one of these a put."""
GROWTH = 0.02
SLACK_BYTES = 2 << 20
"""Of each process: what an allocator may take or give back from one second to the next."""
Role = Callable[[int, Event], Counter[str]]


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
            and width in WIDTHS
            and torch.equal(dense[number], torch.arange(seed, seed + width))
            and torch.equal(ragged[number], torch.arange(seed, seed + 1 + seed % 509))
            and texts[number] == f"{seed:x}" * (seed % 7)
        )
        wrong += not good
    return wrong


def write(writer: int, stop: Event) -> Counter[str]:
    """Put, overwrite and clear the rows of one partition until ``stop``."""
    chance, count, version = random.Random(writer), Counter[str](), 0
    partition = f"writer{writer}"
    while not stop.is_set():
        version += 1
        keys = sorted(chance.sample(range(KEYS), chance.choice((1, 8, 64))))
        batch = rows_of(writer, keys, version, chance.choice(WIDTHS))
        try:
            tq.kv_batch_put([f"k{key}" for key in keys], partition, batch)
        except CapacityError:  # what slow readers hold takes room; it comes back
            count["refused"] += 1
            continue
        count["puts"] += 1
        count["bytes"] += int(batch["dense"].nbytes)
        if chance.random() < 0.2:
            tq.kv_clear([f"k{key}" for key in keys[::2]], partition)
            count["clears"] += 1
        if chance.random() < 0.01:
            tq.get_client().clear_partition(partition)
            count["partition clears"] += 1
    return count


def _read(number: int, stop: Event, hold_s: float) -> Counter[str]:
    chance, count = random.Random(1000 + number), Counter[str]()
    while not stop.is_set():
        writer = chance.randrange(WRITERS)
        keys = chance.sample(range(KEYS), chance.choice((1, 4, 16)))
        try:
            batch = tq.kv_batch_get([f"k{key}" for key in keys], f"writer{writer}", zero_copy=hold_s > 0)
        except (KeyNotFoundError, StorageKeyNotFoundError, NotReadyError):  # cleared, or not put yet
            count["absent"] += 1
            continue
        count["gets"] += 1
        count["wrong"] += wrong_rows(batch, writer, keys)
        if hold_s:
            stop.wait(hold_s)
            count["wrong"] += wrong_rows(batch, writer, keys)
    return count


def read(number: int, stop: Event) -> Counter[str]:
    """Get copies and check them."""
    return _read(number, stop, 0.0)


def read_slowly(number: int, stop: Event) -> Counter[str]:
    """Get views, check them, hold them while their rows are overwritten and cleared, and check them again."""
    return _read(number, stop, 0.2)


def work(address: str, role: Role, number: int, stop: Event, pipe: Pipe) -> None:
    torch.set_num_threads(1)
    tq.init({"controller": {"addresses": [address]}})
    try:
        rows_of(number, [0], 0, WIDTHS[0])  # imports what torch loads on first use
        pipe.send("ready")
        pipe.send(dict(role(number, stop)))
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


def watch(processes: dict[str, psutil.Process], seconds: float) -> dict[str, list[tuple[int, int]]]:
    """(own bytes, descriptors) of each process, every half second; probes in between."""
    samples: dict[str, list[tuple[int, int]]] = {name: [] for name in processes}
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        time.sleep(0.5)
        if number % 10 == 0:
            probe()
        number += 1
        for name, process in processes.items():
            samples[name].append((own_bytes(process), process.num_fds()))
    return samples


def faults(samples: dict[str, list[tuple[int, int]]], strict: bool) -> list[str]:
    """What grew from the second fifth of the run, when all is warm, to the last. Without ``strict`` the run was too
    short to tell memory that is still being taken into use from memory that is lost: four times as much is let pass."""
    found = []
    for name, values in samples.items():
        fifth = max(1, len(values) // 5)
        early, late = values[fifth : 2 * fifth], values[-fifth:]
        before, after = (statistics.median(nbytes for nbytes, _ in part) for part in (early, late))
        allowed = (before * GROWTH + SLACK_BYTES) * (1 if strict else 4)
        if after - before > allowed:
            found.append(f"{name} grew from {before / 1e6:.1f} to {after / 1e6:.1f} MB")
        files = [max(count for _, count in part) for part in (early, late)]
        if files[1] > files[0] + 1:  # a scrape of the metrics, or a file that is just being read
            found.append(f"{name} had {files[0]} descriptors and has {files[1]}")
    return found


def soak(seconds: float) -> dict[str, Any]:
    """Counts of what was done, memory of each process, and ``faults``: empty if all is well."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    roles: list[tuple[Role, int]] = [(write, number) for number in range(WRITERS)]
    roles += [(read, 0), (read, 1), (read_slowly, 0)]
    with LocalStack(default_plan(units=2, unit_capacity=UNIT_BYTES)).start() as stack:
        processes = {process.name: psutil.Process(process.pid) for process in stack.processes if process.pid}
        pipes = []
        for role, number in roles:
            mine, theirs = context.Pipe(False)
            arguments = (stack.controller_address, role, number, stop, theirs)
            worker = context.Process(target=work, args=arguments, daemon=True)
            worker.start()
            assert worker.pid is not None
            processes[f"{role.__name__}-{number}"] = psutil.Process(worker.pid)
            pipes.append(mine)
        tq.init({"controller": {"addresses": [stack.controller_address]}})
        try:
            for pipe in pipes:
                pipe.recv()
            samples = watch(processes, seconds)
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
    found = faults(samples, strict=seconds >= 120)
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
    result = soak(parser.parse_args().minutes * 60)
    print(json.dumps(result, indent=1))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
