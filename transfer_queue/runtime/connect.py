"""Connect to a server and shake hands: the client's side of the start of a connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from typing import Any

import msgspec

from transfer_queue.config.attach import parse_address
from transfer_queue.config.security import PeerSecurity
from transfer_queue.errors import ConfigError, ConnectionLostError, InvalidInputError, TransferQueueError
from transfer_queue.runtime.connection import Connection, Endpoint, Keepalive
from transfer_queue.runtime.tls import HANDSHAKE_S, Credentials, explain_loss, explain_tls
from transfer_queue.wire.frames import HELLO_BYTES, HttpPeerError, Limits
from transfer_queue.wire.messages import ENCODER, Challenge, Envelope, Hello, Kind, Welcome

__all__ = ["TRUSTED", "connect", "shake_hands"]

TRUSTED = Limits(header=(1 << 32) - 1)
"""Answers of a server may be long: a list of millions of keys, for example."""
_PLAIN = Credentials(PeerSecurity())


async def connect(
    address: str,
    hello: Hello,
    endpoint: Endpoint,
    decoder: msgspec.msgpack.Decoder[Any],
    keepalive: Keepalive,
    *,
    what: str,
    timeout_s: float,
    credentials: Credentials = _PLAIN,
) -> Connection:
    """Connect to ``host:port`` and shake hands; the reply is ``Connection.welcome``.

    ``what``: the kind of server, for errors. Raises ConnectionLostError, WaitTimeoutError, the server's refusal, or
    ConfigError for a port that serves HTTP.
    """
    host, port = parse_address(address)
    loop = asyncio.get_running_loop()

    def make() -> Connection:
        return Connection(endpoint, decoder, keepalive, peer=f"{what} {address}", limits=TRUSTED)

    try:
        tls = credentials.context()
        secured: dict[str, Any] = {"ssl": tls, "ssl_handshake_timeout": HANDSHAKE_S} if tls else {}
        if tls and credentials.server_name:
            secured["server_hostname"] = credentials.server_name
        _, connection = await asyncio.wait_for(loop.create_connection(make, host, port, **secured), timeout_s)
    except (TimeoutError, asyncio.TimeoutError):
        raise ConnectionLostError(f"cannot reach the {what} at {address}: no answer within {timeout_s:g} s") from None
    except UnicodeError:
        raise ConnectionLostError(f"cannot reach the {what} at {address}: {host} is no name of a host") from None
    except OSError as error:
        if tls and not isinstance(error, ConnectionRefusedError | socket.gaierror):
            raise ConnectionLostError(explain_tls(error, what, address)) from None
        reason = error.strerror or str(error)
        raise ConnectionLostError(f"cannot reach the {what} at {address}: {reason}") from None
    try:
        steps = shake_hands(hello, address, what, credentials)
        try:
            said = next(steps)
            while True:
                answer, _ = await connection.request(said, timeout_s=timeout_s)
                said = steps.send(answer)
        except StopIteration as done:
            connection.welcome = done.value
    except ConnectionLostError as error:
        if not connection.closed:
            connection.close()
            raise  # the answer of what listens there
        if isinstance(connection.fault, HttpPeerError):
            raise _http_error(address, what, credentials) from None
        raise ConnectionLostError(explain_loss(error, tls is not None)) from None
    except (TransferQueueError, asyncio.CancelledError):
        connection.close()
        raise
    if connection.closed:  # right behind the reply
        raise connection.lost_error()
    return connection


def _http_error(address: str, what: str, credentials: Credentials) -> ConfigError:
    origin = f" ({credentials.target.origin} names it)" if credentials.target.origin else ""
    return ConfigError(
        f"{address} serves HTTP, as the port of a page or of metrics does: it is not the {what}, which has another "
        f"address; tq status shows it{origin}"
    )


def shake_hands(hello: Hello, address: str, what: str, credentials: Credentials) -> Generator[Hello, Any, Welcome]:
    """What a client says to a server: yields each Hello, is sent the answer to it, and returns the last answer.

    Raises ConnectionLostError for a peer that is no server, and as ``Credentials.check``.
    """
    hello = credentials.introduce(hello, address)
    _check_hello(hello)
    answer = yield hello
    if isinstance(answer, Challenge):
        hello = credentials.prove(hello, answer, address)
        answer = yield hello
    if not isinstance(answer, Welcome):
        raise ConnectionLostError(f"the {what} at {address} does not answer as a server of TransferQueue does")
    credentials.check(hello, answer, address)
    return answer


def _check_hello(hello: Hello) -> None:
    """Raises InvalidInputError for a Hello that a server does not read."""
    nbytes = len(ENCODER.encode(Envelope(Kind.REQUEST, 1, 0, hello)))
    if nbytes > HELLO_BYTES:
        raise InvalidInputError(
            f"the name of this client ({len(hello.client_id.encode())} bytes) and its token ({len(hello.token)} bytes) "
            f"make a Hello of {nbytes} bytes, and a server reads at most {HELLO_BYTES}: use shorter ones"
        )
