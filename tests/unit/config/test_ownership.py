"""Folders and files that only their own user may have made."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from transfer_queue.config.ownership import check_file, open_own, private_folder
from transfer_queue.errors import StartError

NOBODY = 65534


def test_a_folder_is_made_for_this_user_alone_with_the_parts_that_are_ours(tmp_path: Path) -> None:
    private_folder(tmp_path / "transferqueue" / "q", 2, fix="-")
    for part in (tmp_path / "transferqueue", tmp_path / "transferqueue" / "q"):
        assert stat.S_IMODE(part.stat().st_mode) == 0o700


@pytest.mark.parametrize("part", ["transferqueue", "transferqueue/q"])
def test_a_part_that_somebody_else_made_first_is_refused_by_name(tmp_path: Path, part: str) -> None:
    squatted = tmp_path / part
    squatted.mkdir(parents=True)
    squatted.chmod(0o777)
    problem = "can be written by others"
    if os.geteuid() == 0:
        os.chown(squatted, NOBODY, NOBODY)
        problem = f"belongs to user {NOBODY}"
    with pytest.raises(StartError, match=f"{squatted} {problem}.*or choose another"):
        private_folder(tmp_path / "transferqueue" / "q", 2, fix="choose another")


def test_a_file_that_somebody_else_may_have_left_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open() as file:
        check_file(file.fileno(), path)
        if os.geteuid() == 0:
            tmp_path.chmod(0o1777)
            os.chown(path, NOBODY, NOBODY)
            with pytest.raises(StartError, match=f"{path} belongs to user {NOBODY}"):
                check_file(file.fileno(), path)
            tmp_path.chmod(0o755)
            check_file(file.fileno(), path)  # as in a volume whose files a group shares
            os.chown(tmp_path, NOBODY, NOBODY)
            with pytest.raises(StartError, match=f"{path} belongs to user {NOBODY}"):
                check_file(file.fileno(), path)
            os.chown(tmp_path, os.geteuid(), -1)
    with open("/dev/null") as device, pytest.raises(StartError, match="not a regular file"):
        check_file(device.fileno(), path)


def test_only_files_that_begin_as_ours_are_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.new"
    for content in (None, b"", b"TQ", b"TQMAGIC1 and more"):
        if content is not None:
            path.write_bytes(content)
        os.close(open_own(path, b"TQMAGIC1"))
        assert path.read_bytes() == b""
    path.write_bytes(b"of the user")
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    for foreign in (path, tmp_path / "link"):
        with pytest.raises(FileExistsError, match=r"belongs to another program|is a link"):
            open_own(foreign, b"TQMAGIC1")
    assert path.read_bytes() == b"of the user"
