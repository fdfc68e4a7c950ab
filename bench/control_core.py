"""How fast and how large the control core is, in one process, without sockets.

    python bench/control_core.py [--samples 1000000] [--repeat 3] [--json]

Each figure is the best of ``--repeat`` runs, since other processes can only make it worse. Commands are built before
the clock starts. "insert" makes rows without data, "notify" commits a block of 8 fields to existing rows, "put" does
both in one commit, "keyed put" names the rows by new keys.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from transfer_queue.control import ControlCore
from transfer_queue.control.commands import BlockRef, Command, Commit, ConsumptionStatus, Fetch, ProductionStatus
from transfer_queue.control.schema import FieldSchema
from transfer_queue.sampler import BaseSampler, GRPOGroupNSampler

FIELDS = [FieldSchema(f"field{number}", "dense", "float32", (16,)) for number in range(8)]
NAMES = [field.name for field in FIELDS]


def insert(start: int, batch: int) -> Commit:
    return Commit("p", append=batch)


def notify(start: int, batch: int) -> Commit:
    indexes = np.arange(start, start + batch, dtype=np.int64).tobytes()
    return Commit("p", indexes=indexes, fields=FIELDS, blocks=[BlockRef(1, start, 0, batch, 100)])


def put(start: int, batch: int) -> Commit:
    return Commit("p", append=batch, fields=FIELDS, blocks=[BlockRef(1, start, 0, batch, 100)])


def keyed_put(start: int, batch: int) -> Commit:
    keys = [f"sample-{number:012d}" for number in range(start, start + batch)]
    return Commit("p", keys=keys, fields=FIELDS, blocks=[BlockRef(1, start, 0, batch, 100)])


def tagged_put(start: int, batch: int) -> Commit:
    tags: list[dict[str, Any]] = [{"step": 3, "uid": number} for number in range(batch)]
    return Commit("p", append=batch, fields=FIELDS, blocks=[BlockRef(1, start, 0, batch, 100)], tags=tags)


def fetch(start: int, batch: int) -> Fetch:
    return Fetch("p", NAMES, batch, "task")


def timed(core: ControlCore, commands: Iterable[Command]) -> float:
    """Seconds that the commands take."""
    ready = list(commands)
    gc.collect()
    gc.disable()
    begin = time.perf_counter()
    for command in ready:
        core.apply(command, 0.0)
    elapsed = time.perf_counter() - begin
    gc.enable()
    return elapsed


def stream(make: Callable[[int, int], Command], samples: int, batch: int) -> Iterable[Command]:
    return (make(start, batch) for start in range(0, samples, batch))


def filled(samples: int, make: Callable[[int, int], Commit] = put, sampler: BaseSampler | None = None) -> ControlCore:
    core = ControlCore(sampler=sampler)
    for command in stream(make, samples, 1024):
        core.apply(command, 0.0)
    return core


def throughput(batch: int, repeat: int) -> dict[str, float]:
    """Operations per second of each kind."""
    operations = 20_000 if batch == 1 else 400
    samples = operations * batch
    best: dict[str, float] = {}

    def note(name: str, core: ControlCore, make: Callable[[int, int], Command]) -> None:
        best[name] = max(best.get(name, 0.0), operations / timed(core, stream(make, samples, batch)))

    for _ in range(repeat):
        core = ControlCore()
        note("insert", core, insert)
        note("notify", core, notify)
        note("fetch", core, fetch)
        for name, make in (("put", put), ("keyed put", keyed_put), ("tagged put", tagged_put)):
            core = ControlCore()
            core.apply(fetch(0, 1), 0.0)  # a subscription to keep filled
            note(name, core, make)
            note(f"fetch after {name}", core, fetch)
        if batch > 1:
            note("fetch of groups of 8", filled(samples, sampler=GRPOGroupNSampler(8)), fetch)
        journaling = ControlCore(journal=True)
        note("put with journal", journaling, put)
    return best


def growth(samples: int, repeat: int) -> dict[str, float]:
    """Microseconds of a fetch of one row, and milliseconds of the status queries, with so many samples."""
    core = filled(samples)
    core.apply(fetch(0, 1), 0.0)  # the first fetch of a task makes its subscription
    count = min(3000, samples // (repeat + 1))  # so that the rows suffice
    fetches = min(timed(core, stream(fetch, count, 1)) / count for _ in range(repeat))
    puts = min(timed(core, stream(put, count, 1)) / count for _ in range(repeat))
    consumed = min(timed(core, [ConsumptionStatus("p", "task")]) for _ in range(repeat))
    produced = min(timed(core, [ProductionStatus("p", NAMES)]) for _ in range(repeat))
    return {
        "fetch_us": fetches * 1e6,
        "put_us": puts * 1e6,
        "consumed_ms": consumed * 1e3,
        "produced_ms": produced * 1e3,
    }


def scattered_fetch(samples: int) -> float:
    """Microseconds of a fetch of one row when every third row only is ready, in random order of arrival."""
    core = ControlCore()
    core.apply(Commit("p", append=samples), 0.0)
    core.apply(fetch(0, 1), 0.0)
    order = np.random.default_rng(0).permutation(samples // 3) * 3
    for start in range(0, len(order), 1024):
        part = order[start : start + 1024]
        block = BlockRef(1, start, 0, len(part), 100)
        core.apply(Commit("p", indexes=part.astype(np.int64).tobytes(), fields=FIELDS, blocks=[block]), 0.0)
    return timed(core, stream(fetch, 300, 1)) / 300 * 1e6


def memory(samples: int, batch: int, make: Callable[[int, int], Commit] = put) -> float:
    """Resident bytes a sample, after each was put and fetched."""
    gc.collect()
    core = ControlCore()
    core.apply(put(0, batch), 0.0)
    core.apply(fetch(0, batch), 0.0)
    before = resident()
    for start in range(0, samples, batch):
        core.apply(make(start, batch), 0.0)
        core.apply(fetch(start, batch), 0.0)
    gc.collect()
    return (resident() - before) / samples


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000, help="size of the large partition")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each measurement")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    result = {
        "memory_per_sample": {  # first, while the process is small
            f"batch {batch}": memory(options.samples, batch) for batch in (1024, 8, 1)
        },
        "operations_per_second": {f"batch {batch}": throughput(batch, options.repeat) for batch in (1, 1024)},
        "growth": {str(samples): growth(samples, options.repeat) for samples in (1000, 30_000, options.samples)},
        "scattered_fetch_us": {str(samples): scattered_fetch(samples) for samples in (3000, options.samples)},
    }
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print_tables(result)


def print_tables(result: dict[str, Any]) -> None:
    single, many = result["operations_per_second"].values()
    print(f"{'':28}{'batch 1: ops/s':>18}{'batch 1024: samples/s':>24}")
    for name, rate in many.items():
        print(f"{name:28}{single.get(name, float('nan')):18,.0f}{rate * 1024:24,.0f}")
    print(f"\n{'samples in the partition':28}{'fetch µs':>12}{'put µs':>12}{'consumed ms':>14}{'produced ms':>14}")
    for samples, row in result["growth"].items():
        print(f"{int(samples):<28,}{row['fetch_us']:12.1f}{row['put_us']:12.1f}", end="")
        print(f"{row['consumed_ms']:14.2f}{row['produced_ms']:14.2f}")
    print("\nfetch of one row, ready rows scattered: ", end="")
    print(", ".join(f"{us:.1f} µs at {int(samples):,}" for samples, us in result["scattered_fetch_us"].items()))
    print("bytes per sample, 8 fields, one task: ", end="")
    print(", ".join(f"{size:.1f} in puts of {batch}" for batch, size in result["memory_per_sample"].items()))


if __name__ == "__main__":
    main()
