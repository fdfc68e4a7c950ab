"""A checkpoint's folder of data is removed by what marks it, never by its name or through a link."""

from __future__ import annotations

from pathlib import Path

import fsspec

from transfer_queue.checkpoint.directory import open_directory


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
