"""Kill a save at each of its steps: ``python -m tests.unit.killed_saves series|directory PLACE``.

Each save runs in a child that SIGKILL ends just before its first, second, third, … change of the file system, until one
comes to its end. After each, every complete checkpoint must be whole, and the newest one before must still be
there. Prints the number of saves that were killed.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import sys
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any

import fsspec
import msgspec

from transfer_queue.checkpoint.borrow import identity_of, lent
from transfer_queue.checkpoint.directory import CheckpointDirectory, Range, open_directory
from transfer_queue.checkpoint.files import BlockPlace, Manifest, read_file, read_manifest
from transfer_queue.checkpoint.save import writing
from transfer_queue.checkpoint.series import Series
from transfer_queue.errors import CheckpointNotFoundError

_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
_START = datetime(2026, 11, 29, tzinfo=timezone.utc)
_KEEP = 2


def blocks(number: int) -> dict[bytes, bytes]:
    """Identity -> bytes of the blocks of the queue at save ``number``. Each save has new ones and lacks old ones; some
    stay for long."""
    ages = [*range(12), *range(20, 400, 20)]
    made = [number - age for age in ages if age <= number]
    return {identity_of("run", each, 0): hashlib.blake2b(str(each).encode()).digest() * (1 + each % 7) for each in made}


def save(directory: CheckpointDirectory, former: CheckpointDirectory | None, number: int) -> None:
    wanted = blocks(number)
    with writing(directory) as writer, lent(directory, former, wanted) as loan:
        writer.borrow(loan.files)
        places = list(loan.places.values())
        for identity, content in wanted.items():
            if identity not in loan.places:
                places.append(writer.add_block(0, [memoryview(content)], identity))
        writer.add_file("blocks.msgpack", msgspec.msgpack.encode(places))
        writer.commit(storage_saved=True, user_metadata={"number": number}, rows=0, partitions=0)


def check(directory: CheckpointDirectory) -> Manifest:
    """The manifest, once all blocks were found as they were saved."""
    manifest = read_manifest(directory)
    places = msgspec.msgpack.decode(read_file(directory, manifest, "blocks.msgpack"), type=list[BlockPlace])
    parts = directory.read_ranges([Range(manifest.path_of(each.file), each.offset, each.nbytes) for each in places])
    found = {place.identity: bytes(part) for place, part in zip(places, parts, strict=True)}
    assert found == blocks(manifest.user_metadata["number"])
    return manifest


class Killed:
    """An audit hook that ends this process just before its change ``at`` of the file system."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def attempt(kind: str, place: str, number: int, at: int) -> bool:
    """Whether save ``number`` came to its end in a child that is killed at change ``at``."""
    child = os.fork()
    if child == 0:
        sys.addaudithook(Killed(at))
        if kind == "series":
            series = Series(place, "queue")
            former = series.newest_own()
            save(series.begin(_START + timedelta(seconds=number)), former, number)
            series.prune(_KEEP)
        else:
            save(open_directory(place), None, number)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status == 0


def newest(kind: str, place: str) -> int:
    """Number of the newest checkpoint, once all complete ones were found whole; -1: there is none."""
    if kind == "series":
        series = Series(place, "queue")
        numbers = [check(series.member(name)).user_metadata["number"] for name in series.names()]
        return max(numbers, default=-1)
    with suppress(CheckpointNotFoundError):
        return int(check(open_directory(place)).user_metadata["number"])
    return -1


def main(kind: str, place: str) -> None:
    fsspec.config.conf["local"] = {"auto_mkdir": True}
    numbers = itertools.count()
    for _ in range(24):
        assert attempt(kind, place, next(numbers), 0)
    killed = 0
    for at in range(1, 2000):
        before, number = newest(kind, place), next(numbers)
        done = attempt(kind, place, number, at)
        assert newest(kind, place) in ((number,) if done else (before, number)), (at, before, number)
        if random.Random(at).random() < 0.3:  # what killed ones left is removed, and nothing else
            assert attempt(kind, place, next(numbers), 0)
        killed += not done
        if done:
            break
    else:
        raise AssertionError("no save came to its end")
    number = next(numbers)
    assert attempt(kind, place, number, 0)
    assert newest(kind, place) == number
    directory = open_directory(place)
    last = directory if kind == "directory" else Series(place).member(Series(place).names()[-1])
    print(killed, len(check(last).borrowed))


if __name__ == "__main__":
    main(*sys.argv[1:])
