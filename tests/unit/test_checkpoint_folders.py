"""A checkpoint's folder of data is removed by what marks it, never by its name or through a link."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import fsspec
import pytest

from transfer_queue.checkpoint.directory import MANIFEST, SERIES, open_directory
from transfer_queue.checkpoint.files import Writer
from transfer_queue.checkpoint.series import Series
from transfer_queue.errors import CheckpointError


def test_in_an_object_store_only_folders_with_a_marker_of_their_own_are_removed() -> None:
    store, url = fsspec.filesystem("memory"), "memory://test-checkpoint-folders/queue"
    directory = open_directory(url)
    name = directory.begin("0a1b2c3d")
    with directory.write(f"{name}/blocks-00000") as file:
        file.write(b"rows")
    directory.publish("0a1b2c3d", b"{}")
    others = [f"{url}/data-20260101/{part}" for part in ("metadata.json", "blocks-00000")]
    others += [f"{url}/data-11223344/{part}" for part in ("rows.msgpack", ".transferqueue-checkpoint")]
    for path in others:
        store.pipe_file(path, b"of somebody else")
    directory.retract()
    directory.erase()
    assert sorted(store.find(url)) == sorted(store._strip_protocol(path) for path in others)


def test_a_folder_of_another_checkpoint_that_a_link_leads_to_stays(tmp_path: Path) -> None:
    other = open_directory(tmp_path / "other")
    other.create()
    name = other.begin("0a1b2c3d")
    with other.write(f"{name}/blocks-00000") as file:
        file.write(b"rows")
    other.publish("0a1b2c3d", b"{}")
    directory = open_directory(tmp_path / "linked")
    directory.create()
    link = tmp_path / "linked" / "data-0a1b2c3d"
    link.symlink_to(tmp_path / "other" / "data-0a1b2c3d")
    directory.remove("data-0a1b2c3d")  # as of the former manifest
    assert other.read("data-0a1b2c3d/blocks-00000") == b"rows"
    assert other.abandoned() == ["data-0a1b2c3d"]
    assert link.is_symlink()


def test_pruning_leaves_a_checkpoint_that_was_moved_away_and_linked(tmp_path: Path) -> None:
    place, archive = tmp_path / "series", tmp_path / "archive"
    series = Series(str(place), "queue")
    for hour in range(4):
        directory = series.begin(datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(hours=hour))
        writer = Writer(directory)
        writer.add_block(0, [memoryview(b"rows")])
        writer.commit(storage_saved=True, user_metadata={}, rows=1, partitions=1)
    archive.mkdir()
    moved, unfinished, _, last = names = series.names()
    for name in (moved, unfinished):
        (place / name).rename(archive / name)
        (place / name).symlink_to(archive / name)
    (archive / unfinished / MANIFEST).unlink()
    before = sorted(archive.rglob("*"))
    series.prune(1)
    assert sorted(archive.rglob("*")) == before
    assert sorted(path.name for path in place.iterdir()) == [*names[:2], last]
    assert series.names() == [moved, last]  # it can still be loaded
    assert (place / last / SERIES).exists()
    for remove in (series.member(moved).retract, series.member(moved).erase):
        with pytest.raises(CheckpointError, match="is a link"):
            remove()
    assert sorted(archive.rglob("*")) == before
