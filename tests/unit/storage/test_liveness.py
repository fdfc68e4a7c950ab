"""Locks that tell living from dead processes, and what hangs on them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from transfer_queue.storage.memory import unit
from transfer_queue.storage.memory.liveness import UNIT_LOCK, holds_lock, take_lock
from transfer_queue.storage.memory.unit import remove_abandoned


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


def test_only_arenas_without_a_living_unit_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit, "_ABANDONED_S", 0.0)
    living, dead, other = (tmp_path / name for name in ("tq-a-1-x", "tq-b-2-y", "other"))
    for path in (living, dead, other):
        path.touch()
    holder = os.open(living, os.O_RDWR)
    take_lock(holder, UNIT_LOCK)
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == [other, living]
    os.close(holder)


def test_a_new_arena_is_left_alone_before_its_unit_locked_it(tmp_path: Path) -> None:
    young = tmp_path / "tq-a-1-x"
    young.touch()
    remove_abandoned(tmp_path)
    assert young.exists()
