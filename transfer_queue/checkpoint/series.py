"""Checkpoints one after the other below one place: a folder each, named by its time in UTC; the newest stay."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime, timedelta, timezone

from transfer_queue.checkpoint.directory import MANIFEST, CheckpointDirectory, open_directory
from transfer_queue.errors import CheckpointError

__all__ = ["Series", "newest"]

_NAME = re.compile(r"[0-9]{8}T[0-9]{6}Z")
_FORMAT = "%Y%m%dT%H%M%SZ"


class Series:
    """The checkpoints below ``place``, a path or a URL. One process at a time saves to it."""

    def __init__(self, place: str) -> None:
        """Raises InvalidInputError, CheckpointError if ``place`` is a checkpoint itself."""
        self._place = place.rstrip("/")
        self._root = open_directory(place)
        if _is_complete(self._root):
            raise CheckpointError(f"{place} is one checkpoint; save at intervals to another place")

    def names(self, *, complete: bool = True) -> list[str]:
        """The names of the checkpoints, oldest first; also of those that a killed save left, unless ``complete``."""
        found = sorted(name for name in self._root.folders() if _NAME.fullmatch(name))
        return [name for name in found if not complete or _is_complete(self.member(name))]

    def member(self, name: str) -> CheckpointDirectory:
        return open_directory(f"{self._place}/{name}")

    def next_name(self, now: datetime) -> str:
        """The name of a checkpoint that is saved at ``now``; behind all others, though a clock may be set back."""
        name = now.astimezone(timezone.utc).strftime(_FORMAT)
        last = max(self.names(complete=False), default="")
        if name > last:
            return name
        return (datetime.strptime(last, _FORMAT) + timedelta(seconds=1)).strftime(_FORMAT)

    def prune(self, keep: int) -> None:
        """Remove all but the newest ``keep`` complete checkpoints, and what killed saves left before the newest."""
        complete = self.names()
        if not complete:
            return
        kept = set(complete[-keep:])
        for name in self.names(complete=False):
            if name not in kept and name < complete[-1]:
                directory = self.member(name)
                with suppress(CheckpointError), directory.locked(shared=False):  # somebody loads it
                    directory.erase()


def newest(place: object) -> CheckpointDirectory:
    """The checkpoint at ``place``, or the newest one of the series there.

    Raises InvalidTypeError, InvalidInputError, OSError.
    """
    directory = open_directory(place)
    if _is_complete(directory):
        return directory
    with suppress(FileNotFoundError, NotADirectoryError):
        series = Series(str(directory))
        if names := series.names():
            return series.member(names[-1])
    return directory


def _is_complete(directory: CheckpointDirectory) -> bool:
    try:
        directory.size(MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
