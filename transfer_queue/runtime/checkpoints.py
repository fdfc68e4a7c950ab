"""The controller's part in checkpoints: hands out its state, and keeps the blocks of it readable meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from transfer_queue.control.checkpoint import (
    NO_UNIT,
    adopt,
    begin_load,
    capture,
    check_empty,
    counted,
    end_load,
    saved_sampler,
)
from transfer_queue.control.commands import Command, Done, Lock, RenewLock, Reply, Snapshot, Value
from transfer_queue.control.core import ControlCore
from transfer_queue.errors import CheckpointError, RequestError, StorageKeyNotFoundError, WaitTimeoutError
from transfer_queue.runtime.connection import Connection
from transfer_queue.runtime.cut import cut, is_large
from transfer_queue.runtime.sessions import ClientSession
from transfer_queue.runtime.units import UnitRegistry
from transfer_queue.wire.frames import Buffer
from transfer_queue.wire.messages import ENCODER, Adopt, Capture, Captured, EndCapture, Resume
from transfer_queue.wire.moves import Receive

__all__ = ["Checkpoints"]

log = logging.getLogger(__name__)

_MAX_STATE_BYTES = 1 << 33
"""Some hundred million rows."""


_Capturer = tuple[Connection, int]
"""Who captures: a connection, and the token of one of its captures."""
_HOLD_S = 20.0
"""Most time for which requests are put off. Clients wait longer than that."""


class Checkpoints:
    """A capture, and its hold, belong to the connection that asked for them and end with it. Each has a token there.

    ``after``: see ``UnitRegistry``. ``replaced`` is called after the whole state was replaced.
    """

    def __init__(
        self,
        core: ControlCore,
        units: UnitRegistry,
        after: Callable[..., None],
        loop: asyncio.AbstractEventLoop,
        replaced: Callable[[], None],
    ) -> None:
        self._core = core
        self._units = units
        self._after = after
        self._loop = loop
        self._replaced = replaced
        self._captures: set[_Capturer] = set()
        self._holder: _Capturer | None = None
        self._loader: ClientSession | None = None
        """The session that loads a checkpoint into this and other controllers."""
        self._limit: asyncio.TimerHandle | None = None
        self._put_off: dict[tuple[Connection, int], Callable[[], None]] = {}

    @property
    def holding(self) -> bool:
        """Whether changes of rows are put off."""
        return self._holder is not None or self._loader is not None

    def puts_off(self, body: Command) -> bool:
        """Whether the command has to wait. Raises CheckpointError if the queue has a part of a checkpoint."""
        if isinstance(body, Lock | RenewLock):
            return False
        if not self._core.state.loading or isinstance(body, Snapshot):
            return self._holder is not None and body.mutates
        if self._loader is None:
            raise CheckpointError(
                "a load of a checkpoint was interrupted before all controllers had it, so the queue refuses requests "
                "for rows; load the checkpoint again (load_checkpoint, tq checkpoint load)"
            )
        return True

    def put_off(self, connection: Connection, request: int, serve: Callable[[], None]) -> None:
        """Call ``serve`` when the hold ends, unless the request is cancelled or its connection ends before."""
        self._put_off[connection, request] = serve

    def cancel(self, connection: Connection, request: int) -> None:
        self._put_off.pop((connection, request), None)

    def serve(
        self,
        connection: Connection,
        request: int,
        body: Capture | Resume | EndCapture | Adopt,
        payload: memoryview | None,
    ) -> None:
        session: ClientSession = connection.context
        if isinstance(body, Capture):
            if self._core.state.loading:
                raise RequestError("a checkpoint is being loaded into this queue, or its load was interrupted")
            capturer = connection, body.token
            self._end(capturer)
            if body.hold and self._core.state.moves.arriving:  # the source may have let it go by now
                raise WaitTimeoutError("a partition is being moved to this controller; save the checkpoint later")
            if body.hold:
                self._hold(capturer)
            self._captures.add(capturer)
            self._capture(capturer, request)
        elif isinstance(body, Resume):
            if self._holder != (connection, body.token):
                raise RequestError(
                    f"the hold of this capture ended after {_HOLD_S:g} s, before every shard was captured"
                )
            self._resume()
            connection.reply(request, Done())
        elif isinstance(body, EndCapture):
            self._end((connection, body.token))
            connection.reply(request, Done())
        else:
            reply = self._load(session, body, payload)
            self._after(connection.reply, request, reply)

    def check_size(self, body: Adopt | Receive, nbytes: int) -> None:
        """Before the state of a checkpoint or a partition is received. Raises RequestError, QueueNotEmptyError."""
        if isinstance(body, Adopt) and not body.replace:
            check_empty(self._core)
        if nbytes > _MAX_STATE_BYTES:
            raise RequestError(f"a state of {nbytes} bytes is larger than {_MAX_STATE_BYTES} and is refused")

    def _load(self, session: ClientSession, body: Adopt, payload: memoryview | None) -> Reply:
        loading = self._core.state.loading
        if body.step == "ask":
            return Value(loading and self._loader is None)
        if self._loader not in (None, session):
            raise RequestError("another checkpoint is being loaded into this queue; try again later")
        if body.step == "begin":
            if self._holder is not None:
                raise RequestError("a checkpoint of this queue is being saved; try again later")
            if not body.replace:
                check_empty(self._core)
            begin_load(self._core)
            self._loader = session
            return Done()
        if loading and self._loader is None:
            raise RequestError("this load of a checkpoint was interrupted; load it again")
        if not body.step:
            self._adopt(session, payload, body.replace)
        elif loading:
            if body.step == "end":
                end_load(self._core)
            self._loader = None
            self._serve_put_off()
        return Done()

    def gone(self, connection: Connection) -> None:
        """End the captures of a connection, and leave what it loads. Loads use none of the pool."""
        loader = self._loader
        if loader is not None and connection.context is loader and connection not in loader.secondary:
            self._loader = None
            self._serve_put_off()
        for capturer in [each for each in self._captures if each[0] is connection]:
            self._end(capturer)

    def _end(self, capturer: _Capturer) -> None:
        """End a capture, if there is such a one."""
        self._captures.discard(capturer)
        if self._holder == capturer:
            self._resume()
        for unit, blocks in self._units.pins.release(capturer).items():
            self._units.free(unit, blocks)

    def _hold(self, capturer: _Capturer) -> None:
        if self._holder is not None:
            raise RequestError("another checkpoint of this queue is being saved; try again later")
        self._holder = capturer
        self._limit = self._loop.call_later(_HOLD_S, self._resume)

    def _resume(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._holder = self._limit = None
        self._serve_put_off()

    def _serve_put_off(self) -> None:
        put_off, self._put_off = self._put_off, {}
        for (connection, _), serve in put_off.items():
            # A client that has come back repeats its requests over its new connection.
            if not connection.closed and connection.context.speaks_over(connection):
                serve()

    def _capture(self, capturer: _Capturer, request: int) -> None:
        """Fix the state of now, and send it when it is encoded. Raises SamplerError."""
        connection, _ = capturer
        core, table = self._core, self._core.state.blocks
        sampler = saved_sampler(core)
        content = cut(lambda: ENCODER.encode(capture(core, sampler)), is_large(core))
        blocks = table.block.array[table.live_slots()]
        pins = self._units.pins
        pins.hold(capturer, None)  # what may be freed is told from the sorted blocks

        def finish() -> Buffer:
            blocks.sort()
            return content()

        def finished(done: asyncio.Future[Buffer]) -> None:
            if done.cancelled() or connection.closed or not pins.holds(capturer):
                return
            error = done.exception()
            if error is not None:
                self._end(capturer)
                connection.fail(request, error)
                return
            pins.hold(capturer, blocks)
            connection.reply(request, Captured(), [done.result()])

        self._loop.run_in_executor(None, finish).add_done_callback(finished)

    def _adopt(self, session: ClientSession, payload: memoryview | None, replace: bool) -> None:
        try:
            content: dict[str, Any] = msgspec.msgpack.decode(payload or b"", type=dict)
            blocks = content["state"]["blocks"]
            units = np.frombuffer(blocks["unit"], np.int32)[1:]
            numbers = np.frombuffer(blocks["block"], np.uint64)[1:][units != NO_UNIT].tolist()
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise RequestError(f"the state is damaged: {type(error).__name__}: {error}") from error
        for number in numbers:
            if number >> 32 != session.writer:
                raise RequestError(f"block {number:#x} was not written by this client session")
            if number in session.fenced:
                raise StorageKeyNotFoundError(f"block {number:#x} was freed before it was adopted; load again")
        gone = adopt(self._core, content, replace=replace, now=self._loop.time())
        self._replaced()
        if gone:
            log.warning("a checkpoint replaced %s", counted(gone))
        for number in numbers:
            session.announced.pop(number, None)
