"""Files of a checkpoint whose checksums are right and whose fields make no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from transfer_queue.checkpoint.directory import CheckpointDirectory, open_directory
from transfer_queue.checkpoint.files import BlockPlace, Manifest, Writer
from transfer_queue.checkpoint.load import captured_state, verify
from transfer_queue.errors import CorruptCheckpointError


def _saved(path: Path, place: dict[str, int], **state: Any) -> tuple[CheckpointDirectory, Manifest]:
    directory = open_directory(path)
    directory.create()
    writer = Writer(directory)
    right: BlockPlace = writer.add_block(1, [memoryview(b"block")])
    writer.add_file("blocks.msgpack", msgspec.msgpack.encode([msgspec.structs.replace(right, **place)]))
    writer.add_file("controller.msgpack", msgspec.msgpack.encode({"state": {}, **state}))
    return directory, writer.commit(storage_saved=True, user_metadata={}, rows=1, partitions=1)


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ({"slot": -5}, "slot -5 is none"),
        ({"slot": 1 << 40}, "slot 1099511627776 is none"),
        ({"file": -9}, "there is no file -9"),
        ({"file": 99}, "there is no file 99"),
        ({"offset": -64}, "offset -64 and bytes 5 are not within file 0"),
        ({"nbytes": 1 << 45}, "offset 0 and bytes 35184372088832 are not within file 0 of 5 bytes"),
    ],
)
def test_a_place_that_no_save_writes_is_named(tmp_path: Path, place: dict[str, int], problem: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=rf"blocks\.msgpack is damaged: block 0: {problem}"):
        verify(*_saved(tmp_path, place))


@pytest.mark.parametrize("state", [{"sampler": [1]}, {"sampler": 5}, {"state": 5}])
def test_a_state_that_no_controller_writes_is_named(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError, match=rf"controller\.msgpack is damaged: {next(iter(state))} is not"):
        captured_state(*_saved(tmp_path, {}, **state))
