"""Checkpoints one after the other below one place: a folder each, named by its time in UTC; the newest stay."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime, timedelta, timezone

from transfer_queue.checkpoint.directory import MANIFEST, SERIES, CheckpointDirectory, open_directory
from transfer_queue.checkpoint.files import decode_manifest
from transfer_queue.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError

__all__ = ["Series", "newest"]

_NAME = re.compile(r"[0-9]{8}T[0-9]{6}Z")
_FORMAT = "%Y%m%dT%H%M%SZ"


class Series:
    """The checkpoints below ``place``, a path or a URL. One process at a time saves to it."""

    def __init__(self, place: str, queue: str = "") -> None:
        """``queue``: identity of the queue that is saved; other queues' checkpoints are never removed.

        Raises InvalidInputError, CheckpointError if ``place`` is a checkpoint itself.
        """
        self._queue = queue.encode()
        self._place = place.rstrip("/")
        self._root = open_directory(place)
        if _is_complete(self._root):
            raise CheckpointError(f"{place} is one checkpoint; save at intervals to another place")

    def names(self, *, complete: bool = True) -> list[str]:
        """The names of the checkpoints, oldest first; also of those that a killed save left, unless ``complete``."""
        found = sorted(name for name in self._root.folders() if _is_time(name))
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

    def begin(self, now: datetime) -> CheckpointDirectory:
        """The directory for a checkpoint that is saved at ``now``, marked as one of this queue. Raises OSError."""
        directory = self.member(self.next_name(now))
        directory.create()
        with directory.write(SERIES) as file:
            file.write(self._queue)
        return directory

    def newest_own(self) -> CheckpointDirectory | None:
        """The newest complete checkpoint of this queue, whose files the next one may use."""
        return next((self.member(name) for name in reversed(self.names()) if self._is_own(name)), None)

    def prune(self, keep: int) -> None:
        """Remove all but the newest ``keep`` complete checkpoints of this queue, and what its killed saves left before
        the newest. Files that others use stay, and so do links and what `begin` did not mark. Raises CheckpointError,
        OSError.
        """
        own = [name for name in self.names(complete=False) if self._is_own(name)]
        complete = [name for name in own if _is_complete(self.member(name))]
        old = [name for name in own if name not in complete[-keep:] and complete and name < complete[-1]]
        for name in set(old) & set(complete):
            directory = self.member(name)
            with suppress(CheckpointError), directory.locked(shared=False):  # somebody loads it
                directory.retract()
        needed = self._needed()
        for name in old:
            if not _is_complete(self.member(name)):
                self.member(name).erase(needed.get(name, ()))

    def _needed(self) -> dict[str, set[str]]:
        """Name of a checkpoint -> its files that complete ones after it use. Raises CheckpointError, OSError."""
        found: dict[str, set[str]] = {}
        for name in self.names():
            with suppress(CheckpointNotFoundError, CorruptCheckpointError):  # it can never be loaded
                for file in decode_manifest(self.member(name)).borrowed:
                    beside, _, path = file.path.removeprefix("../").partition("/")
                    owner, path = (beside, path) if file.path.startswith("../") else (name, file.path)
                    found.setdefault(owner, set()).add(path)
        return found

    def _is_own(self, name: str) -> bool:
        """A link is none: the user keeps what it leads to elsewhere."""
        if self.member(name).is_link():
            return False
        with suppress(FileNotFoundError, NotADirectoryError):
            return self.member(name).read(SERIES) == self._queue
        return False


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


def _is_time(name: str) -> bool:
    try:
        return bool(_NAME.fullmatch(name) and datetime.strptime(name, _FORMAT) + timedelta(seconds=1))
    except (ValueError, OverflowError):
        return False
