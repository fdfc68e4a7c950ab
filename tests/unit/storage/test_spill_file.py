from __future__ import annotations

import random
from pathlib import Path

from transfer_queue.storage.memory.spill import SpillFile


def test_blocks_come_back_whatever_was_freed_between(tmp_path: Path) -> None:
    chance = random.Random(5)
    spill = SpillFile(tmp_path / "made")
    held: dict[object, bytes] = {}
    for _ in range(300):
        if held and chance.random() < 0.45:
            place = chance.choice(list(held))
            assert bytes(spill.read(place)) == held.pop(place)  # type: ignore[arg-type]
            spill.free(place)  # type: ignore[arg-type]
        else:
            data = chance.randbytes(chance.randrange(1, 20_000))
            place = spill.reserve(len(data))
            spill.write(place, memoryview(data))
            held[place] = data
    for place, data in held.items():
        assert bytes(spill.read(place)) == data  # type: ignore[arg-type]
        spill.free(place)  # type: ignore[arg-type]
    assert spill.used == 0
    spill.close()
    assert list((tmp_path / "made").iterdir()) == []


def test_room_that_lies_apart_takes_a_block(tmp_path: Path) -> None:
    file = SpillFile(tmp_path, 64 << 10)
    places = [file.reserve(4096) for _ in range(16)]
    for place in places[::2]:
        assert place is not None
        file.free(place)
    kept = places[1]
    assert kept is not None
    file.write(kept, memoryview(b"k" * 4096))
    data = random.Random(1).randbytes(30_000)
    place = file.reserve(len(data))
    assert place is not None
    assert len(place.pieces) == 8
    file.write(place, memoryview(data))
    assert file.read(place) == data
    assert file.read(kept) == b"k" * 4096
    assert file.reserve(4096) is None
    file.free(place)
    assert file.used == 8 * 4096
    file.close()
