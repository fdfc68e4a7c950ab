"""Saves that use files of earlier checkpoints: what they write, what stays, and what a killed one leaves."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from tests import preloaded
from tests.integration.stack import ROOT
from tests.unit import killed_saves
from transfer_queue.checkpoint.series import Series
from transfer_queue.errors import CheckpointNotFoundError

NOW = datetime(2026, 11, 29, tzinfo=timezone.utc)


@pytest.mark.parametrize("store", ["", "local://"], ids=["file system", "object store"])
@pytest.mark.parametrize("kind", ["series", "directory"])
def test_a_save_killed_at_any_step_harms_no_earlier_checkpoint(tmp_path: Path, kind: str, store: str) -> None:
    """For the object store, fsspec's local one stands in, where a killed process leaves what it left."""
    command = [sys.executable, "-m", "tests.unit.killed_saves", kind, f"{store}{tmp_path}/place"]
    done = preloaded.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    killed, borrowed = map(int, done.stdout.split())
    assert killed >= 8
    assert borrowed >= 2


def test_of_many_small_files_few_are_used_and_of_files_that_are_half_empty_none(tmp_path: Path) -> None:
    series = Series(str(tmp_path), "queue")
    for number in range(80):
        former = series.newest_own()
        directory = series.begin(NOW + timedelta(seconds=number))
        killed_saves.save(directory, former, number)
        series.prune(3)
        manifest = killed_saves.check(directory)
        assert len(manifest.borrowed) <= 16
        assert all(file.bytes <= 2 * file.used for file in manifest.borrowed)
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*/data-*/blocks-*"))
    last = sum(map(len, killed_saves.blocks(79).values()))
    assert on_disk < 2 * last + 3 * 20 * 448, "what no checkpoint needs is removed"
    assert len(list(tmp_path.iterdir())) <= 3 + 3 * 16


def test_a_file_of_an_earlier_checkpoint_that_is_gone_is_named_and_the_next_save_does_without_it(
    tmp_path: Path,
) -> None:
    series = Series(str(tmp_path), "queue")
    for number in (30, 31):
        former = series.newest_own()
        killed_saves.save(series.begin(NOW + timedelta(seconds=number)), former, number)
    first, second = map(series.member, series.names())
    (gone,) = Path(str(first)).glob("data-*/blocks-00000")
    gone.unlink()
    with pytest.raises(CheckpointNotFoundError, match=f"there is no {gone}"):
        killed_saves.check(second)
    third = series.begin(NOW + timedelta(seconds=32))
    killed_saves.save(third, second, 32)
    assert killed_saves.check(third).borrowed == []
