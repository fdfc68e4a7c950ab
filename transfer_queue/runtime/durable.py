"""Group commit: what the controller decided reaches the journal before anybody hears of it.

Entries that come up within one turn of the event loop are one batch and one write. With ``sync`` the batch also waits
for the disk, and what comes up meanwhile is the next batch. Answers and all else that others would notice wait for the
batch that they depend on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Final

from transfer_queue.control.records import Record
from transfer_queue.errors import JournalWriteError
from transfer_queue.journal import Journal
from transfer_queue.runtime.entries import encode_batch
from transfer_queue.wire.frames import Buffer

__all__ = ["GroupCommit"]

log = logging.getLogger(__name__)

Action = tuple[Callable[..., None], tuple[Any, ...]]
COMPACT_BYTES: Final = 64 << 20
"""A snapshot is due once this much was written since the last one, or as much as that one takes if that is more."""
_WRITE_OUT_BYTES: Final = 4 << 20


class GroupCommit:
    """Writes entries to ``journal`` and runs actions once those before them are kept.

    ``sync``: kept means on the disk; waits for it in ``executor``. ``state``: fixes the state of now
    for a snapshot, and returns what waits for its encoding (`transfer_queue.runtime.cut.cut`).
    ``failed``: called once if the journal cannot be written; nothing is acknowledged afterwards. ``unkept``: called
    before it for each action that waited for a batch of which nothing was written.
    """

    def __init__(
        self,
        journal: Journal,
        loop: asyncio.AbstractEventLoop,
        executor: Executor | None,
        *,
        sync: bool,
        state: Callable[[], Callable[[], Buffer]],
        failed: Callable[[JournalWriteError], None],
        unkept: Callable[[Action, JournalWriteError], None] = lambda action, error: None,
        compact_bytes: int = COMPACT_BYTES,
    ) -> None:
        self._journal = journal
        self._loop = loop
        self._executor = executor
        self._sync = sync
        self._state = state
        self._failed = failed
        self._unkept = unkept
        self._compact_bytes = compact_bytes
        self._entries: list[Record] = []
        self._actions: list[Action] = []
        self._dirty = False  # there are entries that the last batch did not keep
        self._scheduled = False
        self._syncing = False
        self._snapshotting = False
        self._writing = False
        self._broken = False

    def add(self, entry: Record) -> None:
        self._entries.append(entry)
        self._dirty = True
        self._schedule()

    def after(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run ``action`` once all entries so far are kept: at once if they are, and in the order of the calls."""
        if self._broken:
            return
        if self._dirty or self._actions or self._syncing:
            self._actions.append((action, arguments))
            self._schedule()
        else:
            action(*arguments)

    def flush(self) -> None:
        """Write what came up so far, without waiting for the disk."""
        if self._entries and not self._broken:
            entries, self._entries = self._entries, []
            try:
                self._journal.append([encode_batch(entries)])
            except JournalWriteError as error:
                for action in self._actions:
                    self._unkept(action, error)
                self._fail(error)

    def _schedule(self) -> None:
        if not self._scheduled and not self._syncing and not self._broken:
            self._scheduled = True
            self._loop.call_soon(self._commit)

    def _commit(self) -> None:
        self._scheduled = self._dirty = False
        self.flush()
        if self._broken:
            return
        actions, self._actions = self._actions, []
        if not self._sync:
            self._run(actions)
            if self._journal.unwritten > _WRITE_OUT_BYTES and not self._writing:
                self._write_out()
            return
        self._syncing = True
        future = self._loop.run_in_executor(self._executor, self._journal.sync)
        future.add_done_callback(lambda done: self._synced(done, actions))

    def _synced(self, done: asyncio.Future[None], actions: list[Action]) -> None:
        self._syncing = False
        if done.cancelled():
            return
        error = done.exception()
        if isinstance(error, JournalWriteError):
            self._fail(error)
            return
        done.result()
        self._run(actions)
        if self._dirty or self._actions:
            self._schedule()

    def _run(self, actions: list[Action]) -> None:
        for action, arguments in actions:
            action(*arguments)
        due = max(self._compact_bytes, self._journal.snapshot_bytes)
        if self._journal.since_snapshot > due and not self._snapshotting and not self._entries:
            self._snapshot()

    def _snapshot(self) -> None:
        try:
            number = self._journal.start_snapshot()
        except JournalWriteError as error:
            self._fail(error)
            return
        self._snapshotting = True
        state = self._state()
        future = self._loop.run_in_executor(self._executor, lambda: self._journal.write_snapshot(number, state()))
        future.add_done_callback(self._snapshot_written)

    def _snapshot_written(self, done: asyncio.Future[None]) -> None:
        self._snapshotting = False
        if not done.cancelled() and (error := done.exception()) is not None:
            log.warning("%s; the journal goes on without a snapshot", error)

    def _write_out(self) -> None:
        """Without ``sync`` nothing waits for the disk but the end of a segment, which is not to wait for much."""
        number, self._writing = self._journal.start_write_out(), True

        def written(done: asyncio.Future[None]) -> None:
            self._writing = False

        self._loop.run_in_executor(self._executor, self._journal.write_out, number).add_done_callback(written)

    def _fail(self, error: JournalWriteError) -> None:
        self._broken = True
        self._actions.clear()
        self._failed(error)
