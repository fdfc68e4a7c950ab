"""A controller's journal from its opening to its end: what it held goes into the controller, what changes into it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from transfer_queue.control.commands import Committed
from transfer_queue.control.records import Record, UnitJoined, UnitLost
from transfer_queue.errors import ConfigError, CorruptJournalError, JournalWriteError
from transfer_queue.journal import Journal
from transfer_queue.runtime.connection import Connection
from transfer_queue.runtime.cut import cut, is_large
from transfer_queue.runtime.durable import COMPACT_BYTES, Action, GroupCommit
from transfer_queue.runtime.entries import (
    BlocksFenced,
    KeptReply,
    RunBegan,
    SavedSession,
    SavedState,
    SessionClosed,
    SessionOpened,
    UnitRegistered,
    decode_batch,
)
from transfer_queue.wire.messages import ENCODER

if TYPE_CHECKING:
    from transfer_queue.runtime.controller import Controller

__all__ = ["JournalRecovery", "attach_journal", "recover", "saved_state"]

log = logging.getLogger(__name__)

_STATE = msgspec.msgpack.Decoder(SavedState)


class JournalRecovery:
    """Opens the journal of a controller, restores it from there and lets it write there from then on.

    Sets ``stop`` when the journal cannot be written any more. Raises ConfigError, StartError, CorruptJournalError.
    """

    def __init__(self, controller: Controller, stop: asyncio.Event) -> None:
        config = controller.config
        if config.journal is None:
            raise ConfigError(f"journal: durability {config.durability} needs the folder of a journal")
        self._stop = stop
        self._failure: JournalWriteError | None = None
        self._executor = ThreadPoolExecutor(2, "tq-journal")  # acknowledgements do not wait for a snapshot
        self._journal = Journal(config.journal)
        attach_journal(
            controller, self._journal, asyncio.get_running_loop(), self._executor, self._failed,
            sync=config.durability == "node",
        )  # fmt: skip
        if controller.core.state.rows:
            log.warning("%d rows restored from the journal in %s", controller.core.state.rows, config.journal)

    def _failed(self, error: JournalWriteError) -> None:
        self._failure = error
        self._stop.set()

    def check(self) -> None:
        """Raises JournalWriteError if that is why the controller ends."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._executor.shutdown()
        self._journal.close()


def attach_journal(
    controller: Controller,
    journal: Journal,
    loop: asyncio.AbstractEventLoop,
    executor: Executor | None,
    failed: Callable[[JournalWriteError], None],
    *,
    sync: bool,
    compact_bytes: int = COMPACT_BYTES,
) -> None:
    """Restore ``controller`` from ``journal`` and let it write there from now on. Raises CorruptJournalError."""
    recover(controller, journal, loop.time())
    controller.journal = GroupCommit(
        journal, loop, executor, sync=sync, failed=failed, unkept=_refuse_put, compact_bytes=compact_bytes,
        state=lambda: cut(lambda: saved_state(controller), is_large(controller.core)),
    )  # fmt: skip
    controller.record(RunBegan(controller.run))


def _refuse_put(action: Action, error: JournalWriteError) -> None:
    """Tell the client of a put why it was not kept. Other requests are asked again when the controller is back."""
    (call, arguments), connection = action, getattr(action[0], "__self__", None)
    if call.__name__ == "reply" and isinstance(connection, Connection) and isinstance(arguments[1], Committed):
        connection.fail(arguments[0], error)


def saved_state(controller: Controller) -> bytes:
    """All that matters of a controller, for a snapshot."""
    units, lost, next_unit = controller.units.saved()
    sessions = [session.saved() for session in controller.clients]
    return ENCODER.encode(SavedState(controller.run, controller.core.snapshot(), sessions, units, lost, next_unit))


def recover(controller: Controller, journal: Journal, now: float) -> None:
    """Into a controller that has served nobody. Clients and units have time to come back as if they had just left."""
    found = journal.recover()
    try:
        if found.snapshot is not None:
            state = _STATE.decode(found.snapshot)
            controller.clients.run = state.run
            controller.core.restore(state.core)
            for session in state.sessions:
                controller.clients.restore(session)
            controller.units.restore(state.units, state.lost, state.next_unit)
        controller.core.replay(_core_records(controller, found.batches))
    except (msgspec.DecodeError, KeyError) as error:
        raise CorruptJournalError(
            f"the journal in {journal.folder} is whole but does not make sense: {error}. It may be of another version: "
            "start the controller with that version, or move the folder away to start with an empty queue"
        ) from error
    back = now + controller.config.timing.peer_timeout
    controller.units.expect_back(back)
    for client in controller.clients:
        client.lost_at = back
    controller.core.restart_leases(now)


def _core_records(controller: Controller, batches: Iterator[bytes]) -> Iterator[Record]:
    """The records that are the core's; the others are carried out here."""
    clients, units = controller.clients, controller.units
    for batch in batches:
        for entry in decode_batch(batch):
            if isinstance(entry, RunBegan):
                clients.run = entry.run
            elif isinstance(entry, SessionOpened):
                clients.restore(SavedSession(entry.writer, entry.client_id, {}, []))
            elif isinstance(entry, SessionClosed):
                clients.forget(entry.writer)
            elif isinstance(entry, KeptReply):
                session = clients.get(entry.writer)
                if session is not None:
                    session.keep_reply(entry.request, entry.reply)
            elif isinstance(entry, BlocksFenced):
                for block in entry.blocks:
                    clients.fence(block)
            elif isinstance(entry, UnitRegistered):
                units.replay(entry)
            else:
                if isinstance(entry, UnitLost | UnitJoined):
                    units.replay(entry)
                yield entry
