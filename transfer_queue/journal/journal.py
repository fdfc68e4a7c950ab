"""A journal: segments of batches, snapshots that make older segments superfluous, recovery after a crash."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from transfer_queue.config.ownership import check_file, is_own, open_own
from transfer_queue.errors import JournalWriteError, StartError
from transfer_queue.journal.files import (
    HEADER_BYTES,
    Buffer,
    Header,
    SegmentReader,
    corrupt,
    frame,
    magic,
    numbered,
    pack_header,
    unfinished,
)

__all__ = ["Journal", "Recovered"]

SEGMENT_BYTES: Final = 64 << 20
_WRITEV_BUFFERS: Final = 1024


class Recovered:
    """What a journal held when it was opened. ``batches`` must be read to the end before anything is appended."""

    def __init__(self, snapshot: bytes | None, batches: Iterator[bytes]) -> None:
        self.snapshot = snapshot
        self.batches = batches


class Journal:
    """One process at a time appends to the journal in ``folder``, which is made if it is absent.

    Batches of bytes go in, the same come out after a restart, in order: those of which `append` returned survive the
    end of the process, those before a `sync` that returned survive the end of the machine. Not for several threads,
    but for `sync`, `write_out` and `write_snapshot`, which may run beside the others.

    Raises StartError if the folder cannot be used or another process uses it.
    """

    def __init__(self, folder: str | os.PathLike[str], *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = Path(folder)
        self._segment_bytes = segment_bytes
        self._file = -1
        self._number = 0
        self._length = 0
        self.since_snapshot = 0
        """Bytes of batches that a restart would read back."""
        self.snapshot_bytes = 0
        """Size of the newest snapshot."""
        self.unwritten = 0
        """Bytes that were appended since the last `sync` or `start_write_out`."""
        self._lock = self._claim()

    def _claim(self) -> int:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self.folder / "lock"
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartError(f"cannot keep a journal in {self.folder}: {error.strerror}; give another folder") from None
        try:
            check_file(lock, path)
        except StartError:
            os.close(lock)
            raise
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise StartError(
                f"the journal in {self.folder} is used by another process; stop that controller or give another folder"
            ) from None
        return lock

    # -------------------------------------------------------------------------------------------------------- recovery

    def recover(self) -> Recovered:
        """Read what is there and get ready to append. Raises CorruptJournalError, naming file and byte."""
        self._delete(unfinished(self.folder))
        snapshots = numbered(self.folder, "snapshot")
        segments = numbered(self.folder, "segment")
        first = max(snapshots, default=0)
        snapshot = None if not snapshots else self._read_snapshot(first, snapshots[first])
        self._delete([path for number, path in [*snapshots.items(), *segments.items()] if number < first])
        return Recovered(snapshot, self._read({n: path for n, path in segments.items() if n >= first}, first))

    def _read_snapshot(self, number: int, path: Path) -> bytes:
        reader = SegmentReader(path, "snapshot")
        payload = list(reader.batches())
        if reader.header is None or reader.torn or len(payload) != 1 or reader.header.number != number:
            raise corrupt(path, reader.end, "the snapshot is not whole")
        self.snapshot_bytes = len(payload[0])
        return payload[0]

    def _read(self, segments: dict[int, Path], first: int) -> Iterator[bytes]:
        expected = first
        previous: SegmentReader | None = None
        last = max(segments, default=None)
        for number, path in segments.items():
            if number != expected:
                missing = self.folder / f"segment-{expected:016x}"
                raise corrupt(missing, 0, f"the file is missing, though segment {number:#x} follows it")
            reader = SegmentReader(path)
            for batch in reader.batches():
                self._check_order(reader, number, previous)
                self.since_snapshot += len(batch)
                yield batch
            if number != last:
                if reader.torn or reader.header is None:
                    raise corrupt(path, reader.end, "the file ends within a batch, though other segments follow it")
            elif reader.header is not None:
                self._check_order(reader, number, previous)
            previous = reader
            expected += 1
        self._resume(segments, first, previous)

    def _check_order(self, reader: SegmentReader, number: int, previous: SegmentReader | None) -> None:
        assert reader.header is not None
        if reader.header.number != number:
            raise corrupt(reader.path, 0, f"the file holds segment {reader.header.number:#x}: it was renamed")
        if previous is not None and reader.header.previous_bytes != previous.end:
            raise corrupt(
                previous.path, previous.end, f"the file had {reader.header.previous_bytes} bytes: its end is missing"
            )

    def _resume(self, segments: dict[int, Path], first: int, last: SegmentReader | None) -> None:
        """Append to the last segment, without what a crash left behind it."""
        if last is None:
            self._start_segment(first, 0)
            return
        number = max(segments)
        if last.header is None:
            self._delete([last.path])
            before = segments.get(number - 1)
            self._start_segment(number, 0 if before is None else before.stat().st_size)
            return
        self._file = os.open(last.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._number, self._length = number, last.end
        if last.torn:
            os.ftruncate(self._file, last.end)
            os.fsync(self._file)

    # ------------------------------------------------------------------------------------------------------- appending

    def append(self, payload: Sequence[bytes]) -> None:
        """Add one batch. Raises JournalWriteError, for example on a full disk; then nothing of it is there."""
        if self._length >= self._segment_bytes:
            self.rotate()
        buffers = frame(payload)
        total = sum(map(len, buffers))
        try:
            _write_all(self._file, buffers)
        except OSError as error:
            os.ftruncate(self._file, self._length)
            raise self._write_error(error) from None
        self._length += total
        self.since_snapshot += total
        self.unwritten += total

    def start_write_out(self) -> int:
        """Return the number of the segment, for `write_out`."""
        self.unwritten = 0
        return self._number

    def write_out(self, number: int) -> None:
        """Write to the disk what the segment holds, so that the next `sync` is short. Runs beside all other methods."""
        with suppress(OSError):  # which that `sync` raises, too
            handle = os.open(self.folder / f"segment-{number:016x}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(handle)
            finally:
                os.close(handle)

    def sync(self) -> None:
        """Return once all that was appended before is on the disk. Raises JournalWriteError."""
        try:
            os.fdatasync(self._file)
        except OSError as error:
            raise self._write_error(error) from None

    def rotate(self) -> int:
        """Finish the segment and start the next one, whose number is returned. Not while `sync` runs."""
        self.sync()
        self.unwritten = 0
        finished, self._file = self._file, -1
        os.close(finished)
        self._start_segment(self._number + 1, self._length)
        return self._number

    def _start_segment(self, number: int, previous_bytes: int) -> None:
        path = self.folder / f"segment-{number:016x}"
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.write(self._file, pack_header("segment", Header(number, previous_bytes)))
            os.fdatasync(self._file)
            self._sync_folder()
        except OSError as error:
            raise self._write_error(error) from None
        self._number, self._length = number, HEADER_BYTES

    def _write_error(self, error: OSError) -> JournalWriteError:
        return JournalWriteError(
            f"cannot write the journal in {self.folder}: {error.strerror}; make room there or repair the volume, "
            "then start the controller again"
        )

    # ------------------------------------------------------------------------------------------------------- snapshots

    def start_snapshot(self) -> int:
        """Begin a segment; the state as of now belongs into `write_snapshot` with the number returned."""
        number = self.rotate()
        self.since_snapshot = 0
        return number

    def write_snapshot(self, number: int, payload: Buffer) -> None:
        """Keep the state and delete the segments that led to it. Raises JournalWriteError; the segments stay then."""
        path = self.folder / f"snapshot-{number:016x}"
        fresh = path.with_suffix(".new")
        try:
            handle = open_own(fresh, magic("snapshot"))
            try:
                _write_all(handle, [pack_header("snapshot", Header(number, 0)), *frame([payload])])
                os.fsync(handle)
            finally:
                os.close(handle)
            fresh.rename(path)
            self._sync_folder()
        except OSError as error:
            raise self._write_error(error) from None
        self.snapshot_bytes = len(payload)
        old = [*numbered(self.folder, "snapshot").items(), *numbered(self.folder, "segment").items()]
        self._delete([path for n, path in old if n < number])

    def _delete(self, paths: Sequence[Path]) -> None:
        for path in sorted(paths):  # ascending: a crash in between leaves no gap
            if not is_own(path, magic("segment" if path.name.startswith("segment") else "snapshot")):
                raise corrupt(path, 0, "the file does not belong to the journal")
            path.unlink()

    def _sync_folder(self) -> None:
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def close(self) -> None:
        """Idempotent."""
        for handle in (self._file, self._lock):
            if handle >= 0:
                os.close(handle)
        self._file = self._lock = -1


def _write_all(handle: int, buffers: Sequence[Buffer]) -> None:
    left = [memoryview(buffer) for buffer in buffers if buffer]
    while left:
        written = os.writev(handle, left[:_WRITEV_BUFFERS])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
