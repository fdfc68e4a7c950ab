"""Locks that tell living from dead processes, and what hangs on them."""

from __future__ import annotations

import os
from pathlib import Path

from transfer_queue.storage.memory.arena import ArenaFile, remove_abandoned
from transfer_queue.storage.memory.liveness import UNIT_LOCK, drop_lock, holds_lock, take_lock


def test_a_lock_ends_with_its_open_file_and_numbers_are_independent(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    path.touch()
    holder, asker = (os.open(path, os.O_RDWR) for _ in range(2))
    take_lock(holder, 5)
    assert holds_lock(asker, 5)
    assert not holds_lock(asker, 6)
    os.close(holder)
    assert not holds_lock(asker, 5)
    os.close(asker)


def test_arenas_of_killed_units_are_removed_at_once_and_nothing_else_is(tmp_path: Path) -> None:
    living, dead = (ArenaFile(4096, tmp_path / name) for name in ("tq-a-1-x", "tq-b-2-y"))
    drop_lock(dead.descriptor, UNIT_LOCK)  # as a kill does
    users = [tmp_path / name for name in ("other", "tq-my-data-1", "tq-empty-file-1")]
    for path, content in zip(users, ("a", "a data set, much longer than the header", ""), strict=True):
        path.write_text(content)
    (tmp_path / "tq-a-link-1").symlink_to(dead.path)
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living.path, tmp_path / "tq-a-link-1", *users])
    living.close()
    dead.close()
