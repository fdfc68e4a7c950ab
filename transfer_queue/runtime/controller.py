"""The controller process: ControlCore behind sockets.

``python -m transfer_queue.runtime.controller --config FILE`` with a ControllerConfig.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from time import monotonic, perf_counter
from typing import Any, get_args

import msgspec

from transfer_queue._printable import log_to_stderr
from transfer_queue.config.document import load_document
from transfer_queue.config.processes import ControllerConfig
from transfer_queue.control.commands import (
    Clear,
    Command,
    Commit,
    Committed,
    Fetch,
    Lock,
    Reply,
    Value,
)
from transfer_queue.control.core import ControlCore
from transfer_queue.control.effects import Answer, Effect, FreeBlocks, Journal, Parked
from transfer_queue.control.records import Record
from transfer_queue.control.requests import HandlerTable
from transfer_queue.errors import ConfigError, RequestError, TransferQueueError
from transfer_queue.runtime.access import Tickets
from transfer_queue.runtime.checkpoints import Checkpoints
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.counters import ControllerCounters
from transfer_queue.runtime.drains import Drains
from transfer_queue.runtime.durable import GroupCommit
from transfer_queue.runtime.entries import KeptReply, SessionClosed, SessionOpened
from transfer_queue.runtime.http import StatusServer
from transfer_queue.runtime.last_writes import LastWrites
from transfer_queue.runtime.long_answers import LongAnswers
from transfer_queue.runtime.metrics import controller_metrics
from transfer_queue.runtime.moves import PartitionMoves
from transfer_queue.runtime.observer import Observer
from transfer_queue.runtime.pages import make_pages
from transfer_queue.runtime.picture import picture
from transfer_queue.runtime.process import announce_ready, note_lost_parent, run_process
from transfer_queue.runtime.recovery import JournalRecovery
from transfer_queue.runtime.sampler import load_sampler
from transfer_queue.runtime.server import Server
from transfer_queue.runtime.sessions import ClientSession, ClientSessions, ParkedRequest, UnitSession
from transfer_queue.runtime.tls import ReloadingFile
from transfer_queue.runtime.tracing import Recorder
from transfer_queue.runtime.units import Joining, UnitRegistry, unpack_blocks
from transfer_queue.runtime.welcome import client_attributes, identity
from transfer_queue.runtime.why import explain_timeout
from transfer_queue.wire.messages import (
    Adopt,
    Announce,
    Cancel,
    Capture,
    ControllerRequest,
    Drain,
    EndCapture,
    Envelope,
    Hello,
    Holding,
    Join,
    Joined,
    Look,
    Relocate,
    ReportOrphans,
    Resume,
    Retire,
    Trace,
    UnitReport,
    UnitsChanged,
    Welcome,
)
from transfer_queue.wire.moves import MoveRequest, Receive

__all__ = ["Controller", "main"]

log = logging.getLogger(__name__)

_TICK_AGAIN_S = 0.05
_DECODER = msgspec.msgpack.Decoder(Envelope[ControllerRequest])


class Controller(Server):
    """Serves clients and storage units. All state that matters is in the core; sessions make retries exact.

    With ``journal`` set, whatever others would notice of a change waits until the change is kept there.
    """

    _requests, _notices = HandlerTable(), HandlerTable()
    """By (class of the sender's session, class of the message). Commands go to the core."""

    def __init__(self, config: ControllerConfig, core: ControlCore, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(_DECODER, Keepalive(config.timing.heartbeat, config.timing.peer_timeout))
        self.config = config
        self.newest: Callable[[], ControllerConfig] = lambda: config
        """Reload the settings from their file. Only the number of storage units changes while the controller runs."""
        self.core = core
        self.counters = ControllerCounters()
        self.last_writes = LastWrites()
        self.started = loop.time()
        self.recorder: Recorder | None = None
        self.observer: Observer | None = None
        self.metrics_address = ""
        """host:port of /metrics; empty: off."""
        self.journal: GroupCommit | None = None
        self.clients = ClientSessions(
            secrets.token_hex(8), self._session_opened, config.shard, max(1, len(config.shards))
        )
        self.units = UnitRegistry(
            core,
            self.clients,
            lambda: self._after(self._announce_units),
            self.record,
            self._after,
            config.timing.peer_timeout,
        )
        self.moves = PartitionMoves(
            core, self.units, self.clients, self._after, loop, config.shard, max(1, len(config.shards)), self.serve
        )
        self.checkpoints = Checkpoints(core, self.units, self._after, loop, self.moves.forget)
        self.moves.checkpointing = lambda: self.checkpoints.holding or core.state.loading
        self.tickets = Tickets()
        self.drains = Drains(core, self.units)
        self.long_answers = LongAnswers(self, self._after)
        self._answering: set[asyncio.Task[None]] = set()
        self._loop = loop
        self._effects: list[Effect] = []  # drained and not carried out yet
        self._changed: set[tuple[int, int]] = set()  # requests (client, number) that changed something this time
        self._deadline: asyncio.TimerHandle | None = None
        self._deadline_at: float | None = None
        self._sweeper = loop.call_later(config.timing.heartbeat / 2, self._sweep)

    async def close(self) -> None:
        self._sweeper.cancel()
        if self.observer is not None:
            self.observer.close()
        if self._deadline is not None:
            self._deadline.cancel()
        await super().close()

    @property
    def run(self) -> str:
        """Identity of the queue's life."""
        return self.clients.run

    def now(self) -> float:
        """The clock of everything that the core is told, in seconds."""
        return self._loop.time()

    @property
    def clients_connected(self) -> int:
        return sum(session.connection is not None for session in self.clients)

    @property
    def expected_units(self) -> int:
        """Number of storage units that the queue should have."""
        return self.newest().expected_units

    def missing(self) -> str:
        """What readiness waits for; empty when ready."""
        if self.units.connected >= self.expected_units:
            return ""
        return f"{self.units.connected} of {self.expected_units} storage units are registered"

    # --------------------------------------------------------------------------------------------------------- server

    def welcome(self, connection: Connection, hello: Hello) -> Welcome:
        if hello.role == "unit":
            connection.context = Joining()
            return Welcome("controller", name=self.config.name, run=self.run, attributes=identity(self.config))
        principal = connection.principal
        if principal is not None and principal.name:  # so that nobody resumes another principal's session
            hello = msgspec.structs.replace(hello, client_id=f"{principal.name}/{hello.client_id}")
        if hello.secondary:
            connection.context = session = self.clients.add_secondary(hello, connection)
            attributes = identity(self.config)
            return Welcome(
                "controller", name=self.config.name, run=self.run, writer=session.writer, attributes=attributes
            )
        session, resumed = self.clients.admit(hello, connection)
        if hello.writer and hello.run == self.run and self.clients.get(hello.writer) is None:  # after its session ended
            self.core.client_returned(hello.writer, session.writer)
        if session.parked:  # of a connection that is not yet known to be dead; the client asks again
            session.parked.clear()
            self.core.cancel(session.writer, None, self._loop.time())
            self._flush()
        connection.context = session
        return Welcome(
            "controller",
            name=self.config.name,
            run=self.run,
            writer=session.writer,
            resumed=resumed,
            backend=self.config.backend.kind,
            settings=self.config.backend.settings,
            units=self.units.infos(),
            attributes=client_attributes(self, connection, session.writer),
        )

    def serve(self, connection: Connection, request: int, body: Any, payload: memoryview | None, floor: int) -> None:
        started = perf_counter()
        failed = True
        try:
            if self.access is not None:
                self.access.check(connection, body)
            session = connection.context
            if isinstance(body, Command) and self.checkpoints.puts_off(body):
                later = partial(self.serve, connection, request, body, payload, floor)
                self.checkpoints.put_off(connection, request, later)
                return
            if isinstance(session, ClientSession) and self.long_answers.is_long(body):
                if moved := self.moves.elsewhere(body):
                    self._after(connection.reply, request, moved)
                else:
                    self._in_background(self.long_answers.serve(connection, request, body))
                return
            if isinstance(body, Command) and isinstance(session, ClientSession):
                if self.moves.holds(body):
                    later = partial(self.serve, connection, request, body, payload, floor)
                    self.moves.put_off(connection, request, body.partition, later)
                    return
                reply = self._apply(session, request, body, floor)
            else:
                handler = self._requests.get((type(session), type(body)))
                if handler is None:
                    raise RequestError(f"{type(body).__name__} is not a request of a {type(session).__name__}")
                reply = handler(self, connection, request, body, payload)
            failed = False
        except TransferQueueError as error:
            if isinstance(body, Join):
                log.warning("%s at %s cannot join: %s", body.name, body.address, error)
            self._after(connection.fail, request, error)
        except MemoryError:
            raise  # ends the process
        except Exception as error:  # boundary of a request: the caller gets it, the controller goes on
            log.exception("request %s failed", type(body).__name__)
            self._after(connection.fail, request, RequestError(f"{type(error).__name__} in the controller: {error}"))
        else:
            if reply is not None:
                if self.access is not None:
                    reply = self.access.visible(connection, body, reply)
                self._after(connection.reply, request, reply)
        self.counters.requests.count(type(body), perf_counter() - started, failed)
        self._flush()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    @_requests.on((ClientSession, Look))
    def _look(self, connection: Connection, request: int, body: Look, payload: memoryview | None) -> Value:
        return Value(picture(self))

    @_requests.on((ClientSession, Trace))
    def _traced(self, connection: Connection, request: int, body: Trace, payload: memoryview | None) -> Value:
        return Value(self._trace(connection, body.most))

    @_requests.on((ClientSession, Drain), (ClientSession, Relocate), (ClientSession, Retire))
    def _emptied(
        self, connection: Connection, request: int, body: Drain | Relocate | Retire, payload: memoryview | None
    ) -> Value:
        return self.drains.serve(connection.context, body, connection.principal, self._loop.time())

    @_requests.on(*((ClientSession, kind) for kind in (Capture, Resume, EndCapture, Adopt)))
    def _checkpointed(
        self,
        connection: Connection,
        request: int,
        body: Capture | Resume | EndCapture | Adopt,
        payload: memoryview | None,
    ) -> None:
        self.checkpoints.serve(connection, request, body, payload)

    @_requests.on(*((ClientSession, kind) for kind in get_args(MoveRequest)))
    def _moved(self, connection: Connection, request: int, body: MoveRequest, payload: memoryview | None) -> None:
        self.moves.serve(connection, request, body, payload)

    @_requests.on((Joining, Join))
    def _joined(self, connection: Connection, request: int, body: Join, payload: memoryview | None) -> Joined:
        joined = self.units.join(connection, body, connection.context.inventory(body), self._loop.time())
        if self.access is not None and self.access.limited:
            joined = msgspec.structs.replace(joined, ticket_key=self.tickets.key)
        return joined

    def _trace(self, connection: Connection, most: int) -> list[Any]:
        if most > 0:
            if self.recorder is not None and self.recorder.owner is not connection:
                raise RequestError("somebody else is tracing this queue; try again when that has ended")
            self.recorder = Recorder(connection, most)
            return []
        if self.recorder is None or self.recorder.owner is not connection:
            raise RequestError("this connection has not begun a trace")
        recorder, self.recorder = self.recorder, None
        return recorder.events()

    def _apply(self, session: ClientSession, request: int, command: Command, floor: int) -> Reply | None:
        session.settle(floor)
        keep = command.mutates
        if keep:
            kept = session.kept_reply(request)
            if kept is not None and not self._is_stale(command, kept):
                return kept
            if request < session.floor:
                raise RequestError(f"request {request} was answered and settled; it is not carried out again")
        if request in session.parked:
            return None  # the same request again; its answer is due
        if moved := self.moves.elsewhere(command):
            return moved
        if isinstance(command, Commit):
            session.check_commit(command)
        if isinstance(command, Fetch):
            self.last_writes.fetches(session.client_id, command.task)
        before = self.core.state.partitions.get(command.partition) if isinstance(command, Clear) else None
        started = monotonic()  # the loop's clock stands still while it works
        result = self.core.apply(command, self._loop.time(), client=session.writer, request=request)
        if before is not None and self.core.state.partitions.get(command.partition) is not before:
            self._in_background(self.long_answers.bury(before))
        if isinstance(command, Commit):
            session.committed(command)
            written = len(result.indexes) // 8 if isinstance(result, Committed) else 0
            self.last_writes.note(session.client_id, command, started, written)
            self.counters.bytes_put += sum(ref.nbytes for ref in command.blocks)
        if isinstance(result, Parked):
            session.parked[request] = ParkedRequest(keep, started, command)
            return None
        self.counters.answered(command, result)
        if isinstance(command, Fetch):
            self.last_writes.takes(session.client_id, command.task, command.fields)
        if self.observer is not None:
            self.observer.answered(session.client_id, command, result, started, monotonic())
        if self.recorder is not None:
            self.recorder.record(session.client_id, command, result, started, monotonic())
        if keep:
            session.keep_reply(request, result)
            if self.journal is not None and self._changed_something(session.writer, request):
                self.journal.add(KeptReply(session.writer, request, result))
        return result

    def _is_stale(self, command: Command, kept: Reply) -> bool:
        """Whether ``kept`` grants a lock that has ended: it ended with the connection over which it was granted."""
        return (
            isinstance(command, Lock)
            and isinstance(kept, Value)
            and not self.core.state.locks.is_held(kept.value["lock"])
        )

    def notice(self, connection: Connection, body: Any) -> None:
        handler = self._notices.get((type(connection.context), type(body)))
        if handler is None:
            connection.abort(f"unexpected notice {type(body).__name__}")
        else:
            handler(self, connection, connection.context, body)

    @_notices.on((ClientSession, Announce))
    def _announce(self, connection: Connection, session: ClientSession, body: Announce) -> None:
        session.announce(body)

    @_notices.on((ClientSession, Cancel))
    def _cancel(self, connection: Connection, session: ClientSession, body: Cancel) -> None:
        self.checkpoints.cancel(connection, body.request)
        self.moves.cancel(connection, body.request)
        session.parked.pop(body.request, None)
        self.core.cancel(session.writer, body.request, self._loop.time())  # a lock may be granted already
        self._flush()

    @_notices.on((UnitSession, UnitReport))
    def _report(self, connection: Connection, session: UnitSession, body: UnitReport) -> None:
        self.units.report(session, body)

    @_notices.on((UnitSession, ReportOrphans))
    def _free_orphans(self, connection: Connection, session: UnitSession, body: ReportOrphans) -> None:
        unit = session.info.unit
        self._after(self.units.free, unit, self.units.fence(unit, unpack_blocks(body.blocks)))

    def receive_buffer(self, connection: Connection, body: Any, nbytes: int) -> memoryview | None:
        if isinstance(body, Adopt | Receive):
            if self.access is not None:
                self.access.check(connection, body)
            self.checkpoints.check_size(body, nbytes)
            return None
        return super().receive_buffer(connection, body, nbytes)

    @_notices.on((Joining, Holding), (UnitSession, Holding))
    def _hold(self, connection: Connection, session: Joining | UnitSession, holding: Holding) -> None:
        try:
            if isinstance(session, Joining):
                session.add(holding.blocks)
            else:
                self.core.unit_holds(session.info.unit, unpack_blocks(holding.blocks), self._loop.time())
                self._flush()
        except RequestError as error:
            log.warning("%s is turned away: %s", connection.peer, error)
            connection.abort(str(error))

    def gone(self, connection: Connection) -> None:
        self.checkpoints.gone(connection)
        self.moves.gone(connection)
        session = connection.context
        now = self._loop.time()
        if self.recorder is not None and self.recorder.owner is connection:
            self.recorder = None
        if isinstance(session, ClientSession) and session.connection is connection:
            session.connection = None
            session.lost_at = now
            session.parked.clear()
            session.end_secondary()
            self.core.disconnected(session.writer, now)
        elif isinstance(session, ClientSession):
            session.secondary.discard(connection)
        elif isinstance(session, UnitSession):
            self.units.disconnected(session, connection, now)
        self._flush()

    # ---------------------------------------------------------------------------------------------- effects and time

    def _flush(self) -> None:
        """Carry out what the core decided, and wake up at its next deadline."""
        if self.journal is not None:
            self._drain_records()
        effects, self._effects = self._effects or self.core.drain_effects(), []
        for effect in effects:
            if isinstance(effect, Answer):
                self._answer(effect)
            elif isinstance(effect, FreeBlocks):
                self._after(self.units.free, effect.unit, effect.blocks)
        self._changed.clear()
        deadline = self.core.next_deadline()
        if deadline != self._deadline_at:
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline_at = deadline
            self._deadline = None if deadline is None else self._loop.call_at(deadline, self._tick)

    def _changed_something(self, client: int, request: int) -> bool:
        """Whether the request is to be answered the same way should it come again: it changed something."""
        self._drain_records()
        return (client, request) in self._changed

    def _drain_records(self) -> None:
        """Pass what changed on to the journal."""
        assert self.journal is not None
        for effect in self.core.drain_effects():
            if isinstance(effect, Journal):
                self.journal.add(effect.record)
                self._changed.add((effect.client, effect.request))
            else:
                self._effects.append(effect)

    def record(self, entry: Record) -> None:
        """Keep what a restarted controller has to know."""
        if self.journal is not None:
            self._drain_records()
            self.journal.add(entry)

    def _session_opened(self, session: ClientSession) -> None:
        self.record(SessionOpened(session.writer, session.client_id))
        if self.journal is not None:
            self.journal.flush()  # before the client hears its number

    def _after(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do what others notice once all changes so far are kept."""
        if self.journal is None:
            action(*arguments)
        else:
            if self.core.state.log.pending:
                self._drain_records()
            self.journal.after(action, *arguments)

    def _answer(self, answer: Answer) -> None:
        session = self.clients.get(answer.client)
        parked = session.parked.pop(answer.request, None) if session is not None else None
        if session is None or session.connection is None or parked is None:
            return
        now = monotonic()
        self.counters.waited(answer.reply, now - parked.since)
        if self.observer is not None:
            self.observer.waited(session.client_id, parked.command, answer.reply, parked.since, now)
        if self.recorder is not None:
            self.recorder.record(session.client_id, parked.command, answer.reply, parked.since, now)
        if answer.error is not None:
            error = explain_timeout(self, parked.command, answer.error)
            self._after(session.connection.fail, answer.request, error)
        elif answer.reply is not None:
            if isinstance(parked.command, Fetch):
                self.last_writes.takes(session.client_id, parked.command.task, parked.command.fields)
            if parked.keep:
                session.keep_reply(answer.request, answer.reply)
                if self.journal is not None and self._changed_something(answer.client, answer.request):
                    self.journal.add(KeptReply(session.writer, answer.request, answer.reply))
            self._after(session.connection.reply, answer.request, answer.reply)

    def _tick(self) -> None:
        if self.checkpoints.holding:  # what ends with time changes rows, too
            self._deadline = self._loop.call_later(_TICK_AGAIN_S, self._tick)
            return
        self._deadline_at = None
        self.core.tick(self._loop.time())
        self._flush()

    def _sweep(self) -> None:
        """Forget clients and units that stayed away."""
        timing = self.config.timing
        self._sweeper = self._loop.call_later(timing.heartbeat / 2, self._sweep)
        if self.checkpoints.holding:
            return
        now = self._loop.time()
        self.units.expire(now - timing.reconnect_grace, now)
        for session in self.clients.expired(now - timing.reconnect_grace):
            by_unit: dict[int, list[int]] = {}
            for block, unit in session.announced.items():
                by_unit.setdefault(unit, []).append(block)
            for unit, blocks in by_unit.items():
                self._after(self.units.free, unit, self.core.unknown_blocks(unit, blocks))
            self.core.client_gone(session.writer, now)
            self.record(SessionClosed(session.writer))
        self._flush()

    def _announce_units(self) -> None:
        notice = UnitsChanged(self.units.infos())
        for session in self.clients:
            if session.connection is not None:
                session.connection.send(notice)


async def serve(config: ControllerConfig, stop: asyncio.Event, path: str | None = None) -> None:
    """Run a controller until ``stop`` is set. ``path``: file of ``config``, reloaded for the number of units."""
    if config.shards:
        _check_shards(config)
    core = ControlCore(
        shard=config.shard,
        sampler=load_sampler(config.sampler),
        polling=config.polling_mode,
        sample_capacity=config.sample_capacity,
        journal=config.durability != "none",
        lease_s=config.lease_s,
    )
    if config.security.policy_file is not None and config.backend.kind != "simple":
        raise ConfigError(
            f"security.policyFile: the clients of backend {config.backend.kind!r} move rows past the storage units, "
            "which could not keep tenants apart; use the simple backend, or one queue for each tenant"
        )
    controller = Controller(config, core, asyncio.get_running_loop())
    if path is not None:
        controller.newest = ReloadingFile([path], lambda: load_document(ControllerConfig, path)).get
    pages = make_pages(controller)
    status = StatusServer(controller_metrics(controller), controller.missing, pages, controller.long_answers.count_lost)
    keeping: JournalRecovery | None = None
    try:
        if config.durability != "none":
            keeping = JournalRecovery(controller, stop)
        if config.metrics_port is not None:
            await status.listen(config.host, config.metrics_port, config.advertise_host)
            controller.metrics_address = status.address  # before the first client is welcomed
        await controller.listen(config.host, config.port, config.advertise_host, config.security)
        announce_ready(name=config.name, address=controller.address, metrics=status.address or None, run=controller.run)
        await stop.wait()
        if path is not None and config.durability == "none":
            note_lost_parent(config.name, config.shards or [controller.address], path)
        if keeping is not None:
            keeping.check()
    finally:
        status.close()
        await controller.close()
        if keeping is not None:
            keeping.close()


def _check_shards(config: ControllerConfig) -> None:
    if config.shard >= len(config.shards):
        raise ConfigError(f"shard: {config.shard} is none of the {len(config.shards)} shards, which count from 0")


def main() -> int:
    log_to_stderr()
    return run_process(ControllerConfig, serve, "transfer_queue.runtime.controller")


if __name__ == "__main__":
    sys.exit(main())
