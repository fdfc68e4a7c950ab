"""What explains a failed test: logs of servers, events of the cluster, screenshots.

Who starts something calls ``follow`` with what tells of it, and ``leave`` before its files go. What a failed test left
is copied into a folder that the report names.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

Read = Callable[[], dict[str, str]]
"""Content by file name."""
BYTES = 1 << 20
"""Of each file, its end."""
LINES = 15
"""Of each file, shown in the report."""
FOLDER = Path(os.environ.get("TQ_ARTEFACTS") or Path(tempfile.gettempdir()) / "tq-failed-tests")

_followed: dict[object, Read] = {}
_left: dict[str, str] = {}


def follow(owner: object, read: Read) -> None:
    """``read`` is called when a test fails while ``owner`` runs, or when it ends."""
    _followed[owner] = read


def leave(owner: object) -> None:
    """``owner`` ends, and its files go: they are kept in memory until the next test."""
    read = _followed.pop(owner, None)
    if read is not None:
        _left.update(_tried(read))


def _tried(read: Read) -> dict[str, str]:
    try:
        return read()
    except Exception as error:  # noqa: BLE001 - what failed may be what would be read; the failure of the test counts
        return {"unread.txt": f"{type(error).__name__}: {error}"}


def next_test() -> None:
    _left.clear()


def logs(folder: Path) -> Read:
    """The ends of the log files in ``folder``."""

    def read() -> dict[str, str]:
        return {f"{folder.name}/{path.name}": _end(path) for path in sorted(folder.glob("*.log"))}

    return read


def _end(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - BYTES))
        return file.read().decode(errors="replace")


def write(test: str) -> str:
    """Write all there is for the failed ``test``; the text for its report, empty where there is nothing."""
    found = dict(_left)
    for read in list(_followed.values()):
        found.update(_tried(read))
    folder = FOLDER / re.sub(r"[^\w.-]+", "_", test)[-150:]
    lines = []
    for name, content in found.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        lines += [str(path), *(f"    {line[:300]}" for line in content.splitlines()[-LINES:])]
    return "\n".join(lines)
