"""Bare connections to servers: what no client of the library would send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from tests.integration.security.servers import Servers
from tests.integration.stack import Stack
from transfer_queue.config.document import validate_document
from transfer_queue.config.security import PeerSecurity
from transfer_queue.runtime.connect import connect
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.tls import Credentials
from transfer_queue.storage.base import UnitInfo
from transfer_queue.wire import messages as wire

__all__ = ["as_peer"]

_CONTROLLER = msgspec.msgpack.Decoder(wire.Envelope[wire.ControllerReply])
_UNIT = msgspec.msgpack.Decoder(wire.Envelope[wire.UnitReply])


class _Endpoint:
    def on_request(self, *_: Any) -> None: ...
    def on_notice(self, *_: Any) -> None: ...
    def on_lost(self, *_: Any) -> None: ...
    def receive_buffer(self, *_: Any) -> None: ...


def credentials(security: dict[str, Any]) -> Credentials:
    return Credentials(validate_document(PeerSecurity, security, "test"))


Work = Callable[[Connection, Any], Coroutine[Any, Any, Any]]


def as_peer(
    servers: Servers | Stack, security: dict[str, Any], work: Work, unit: bool | str = False, **hello: Any
) -> Any:
    """What ``work(connection, Welcome)`` gives; the connection is to the controller, or to the first storage unit, or
    that of the given name."""

    async def run() -> Any:
        keepalive = Keepalive(2.0, 60.0)
        shown = {"role": "client", "client_id": "peer", **(hello if not unit else {})}
        first = await connect(
            servers.address, wire.Hello(**shown), _Endpoint(), _CONTROLLER, keepalive,
            what="controller", timeout_s=60, credentials=credentials(security),
        )  # fmt: skip
        try:
            welcome = first.welcome
            if not unit:
                return await work(first, welcome)
            info: UnitInfo = next(info for info in welcome.units if unit in (True, info.name))
            shown = {
                "role": "client", "client_id": "peer", "writer": welcome.writer, "run": welcome.run,
                "ticket": welcome.attributes["ticket"], **hello,
            }  # fmt: skip
            second = await connect(
                info.address, wire.Hello(**shown), _Endpoint(), _UNIT, keepalive,
                what="storage unit", timeout_s=60, credentials=credentials(security),
            )  # fmt: skip
            try:
                return await work(second, welcome)
            finally:
                second.close()
        finally:
            first.close()

    return asyncio.run(run())
