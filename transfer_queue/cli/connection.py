"""The queue of a command, and a light connection to its controller that needs neither torch nor storage."""

from __future__ import annotations

import asyncio
import os
from types import TracebackType
from typing import Annotated, Any, Optional

import msgspec
import typer

from transfer_queue.cli.state import read_running
from transfer_queue.config.attach import AttachConfig, ControllerAddresses, attach_from_environment, parse_address
from transfer_queue.config.document import load_document
from transfer_queue.config.trouble import trouble_at
from transfer_queue.control.commands import Command, ListPartitions, Moved, Value
from transfer_queue.control.directory import Shard, merge_values, shard_of, spans
from transfer_queue.errors import ConfigError, ConnectionLostError, RequestError, TransferQueueError, WaitTimeoutError
from transfer_queue.runtime.connect import connect
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.picture import merged
from transfer_queue.runtime.tls import Credentials
from transfer_queue.wire.messages import ControllerReply, Envelope, Hello, Look
from transfer_queue.wire.moves import Settle

__all__ = ["ControllerConnection", "ControllerOption", "QueueOption", "find_queue", "partitions", "running_queues"]

_DECODER = msgspec.msgpack.Decoder(Envelope[ControllerReply])
_MOST_HOPS = 8
"""Controllers that are asked for a partition, one after the other, while it moves."""


def running_queues(incomplete: str) -> list[str]:
    """Names that a shell offers for a queue."""
    return [queue.name for queue in read_running() if queue.name.startswith(incomplete)]


def partitions(context: typer.Context, incomplete: str) -> list[str]:
    """Names that a shell offers for a partition."""
    given = context.params
    try:
        with ControllerConnection(find_queue(given.get("queue"), given.get("controller")), timeout_s=2.0) as link:
            names = link.request(ListPartitions("")).value
    except TransferQueueError:  # completion cannot show an error
        return []
    return [name for name in names if name.startswith(incomplete) and name.isprintable()]


QueueOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--queue",
        "-q",
        help="Name of a queue of this machine; by default the queue of the environment, or the only one.",
        autocompletion=running_queues,
    ),
]
ControllerOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--controller", "-c", help="Address of a controller, host:port."),
]


def find_queue(queue: str | None = None, controller: str | None = None) -> AttachConfig:
    """The queue at ``controller``, or called ``queue`` here, or that the environment names, or the only one here.

    Raises ConfigError if that is none, or several.
    """
    if controller is not None:
        parse_address(controller)
        return AttachConfig(controller=ControllerAddresses(addresses=[controller]))
    if queue is None and (found := attach_from_environment()) is not None:
        return found
    running = read_running()
    names = ", ".join(item.name for item in running) or "none"
    chosen = [item for item in running if queue in (None, item.name)]
    if len(chosen) > 1:
        raise ConfigError(f"several queues are running here, choose one with --queue: {names}")
    if not chosen:
        what = "no queue is running here" if queue is None else f"queue {queue} is not running here; running: {names}"
        raise ConfigError(
            f"{what}; start one with tq up, name one with --controller host:port, or set TQ_CONFIG_FILE or "
            "TQ_CONTROLLER_ADDRESS"
        )
    return load_document(AttachConfig, chosen[0].attach_file)


class ControllerConnection:
    """Requests to the controller or controllers of a queue, one after the other.

    It connects with the first request, and reconnects after a connection is lost.

    Raises ConnectionLostError, WaitTimeoutError, or what the controller raised.
    """

    def __init__(self, config: AttachConfig, timeout_s: float = 10.0) -> None:
        credentials = Credentials(config.security, config.target)
        self._first = _Line(config.controller.addresses, credentials, timeout_s, "controller")
        self._lines: list[_Line] = []
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> ControllerConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for line in [self._first, *self._lines]:
            line.close()
        self._loop.run_until_complete(asyncio.sleep(0))  # the transport closes in the loop's next round
        self._loop.close()

    def request(self, message: Any) -> Any:
        """The reply to a command; of the queue's controllers the one that has the partition answers, or all of them."""
        return self._loop.run_until_complete(self._request(message))

    def look(self) -> dict[str, Any]:
        """The dataflow; see ``transfer_queue.runtime.picture``."""
        value: dict[str, Any] = self.request(Look()).value
        return value

    @property
    def welcome(self) -> Any:
        """The controller's welcome of the handshake."""
        return self._loop.run_until_complete(self._first.connected()).welcome

    async def _request(self, message: Any) -> Any:
        lines = self._lines or await self._open()
        if isinstance(message, Command) and not spans(message):
            return await self._of_partition(lines, message)
        replies = [await line.request(message) for line in lines]
        if len(replies) == 1:
            return replies[0]
        return Value(merged([reply.value for reply in replies])) if isinstance(message, Look) else merge_values(replies)

    async def _of_partition(self, lines: list[_Line], message: Command) -> Any:
        shard = shard_of(message.partition, len(lines))
        for _ in range(_MOST_HOPS):
            reply = await lines[shard].request(message)
            if not isinstance(reply, Moved):
                return reply
            shard = reply.shard
            if reply.proof:
                await lines[shard].request(Settle(message.partition, reply.proof))
        raise RequestError(f"partition {message.partition!r} is being moved; try again")

    async def _open(self) -> list[_Line]:
        shard = Shard.of((await self._first.connected()).welcome.attributes)
        if shard is None:
            self._lines = [self._first]
        else:
            self._lines = [
                self._line(address, f"controller shard {number}")
                for number, address in enumerate(await self._reached(shard.addresses))
            ]
        return self._lines

    def _line(self, address: str, what: str) -> _Line:
        return _Line([address], self._first.credentials, self._first.timeout_s, what)

    async def _reached(self, announced: list[str]) -> list[str]:
        """Return the address of each shard: its own, or the given one if there is one for each shard, as these may be
        ports that are forwarded to it."""
        given = self._first.addresses
        if len(given) != len(announced) or set(given) == set(announced):
            return announced
        found: dict[int, str] = {}
        for address in given:
            line = self._line(address, "controller")
            try:
                shard = Shard.of((await line.connected()).welcome.attributes)
            except (ConnectionLostError, WaitTimeoutError):
                return announced
            finally:
                line.close()
            if shard is not None:
                found[shard.number] = address
        return [found[number] for number in sorted(found)] if len(found) == len(announced) else announced


class _Line:
    """A connection to one controller."""

    def __init__(self, addresses: list[str], credentials: Credentials, timeout_s: float, what: str) -> None:
        self.credentials = credentials
        self.timeout_s = timeout_s
        self.addresses = addresses
        self._what = what
        self._connection: Connection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def request(self, message: Any) -> Any:
        reply, _ = await (await self.connected()).request(message, timeout_s=self.timeout_s)
        return reply

    async def connected(self) -> Connection:
        if self._connection is not None and not self._connection.closed:
            return self._connection
        hello = Hello("client", f"tq-{os.getpid()}")
        failure: TransferQueueError = ConnectionLostError("no address of a controller is known")
        for address in self.addresses:
            try:
                self._connection = await connect(
                    address,
                    hello,
                    self,
                    _DECODER,
                    Keepalive(2.0, 60.0),
                    what=self._what,
                    timeout_s=self.timeout_s,
                    credentials=self.credentials,
                )
            except (ConnectionLostError, WaitTimeoutError) as error:
                failure = error
            else:
                return self._connection
        target = self.credentials.target
        origin, trouble = target.origin, trouble_at(self.addresses, target.name, target.uid)
        if trouble is not None and isinstance(failure, ConnectionLostError):
            failure = ConnectionLostError(f"{trouble.text}; {failure}" + (f" ({origin} names it)" if origin else ""))
        raise failure

    # ------------------------------------------------------------------------------------------------------- Endpoint

    def on_request(
        self, connection: Connection, request: int, body: Any, payload: memoryview | None, floor: int
    ) -> None:
        connection.fail(request, RequestError("the command line serves no requests"))

    def on_notice(self, connection: Connection, body: Any) -> None:
        pass  # news of storage units; the picture has them

    def receive_buffer(self, connection: Connection, body: Any, nbytes: int) -> memoryview | None:
        return None

    def on_lost(self, connection: Connection) -> None:
        if connection is self._connection:
            self._connection = None
