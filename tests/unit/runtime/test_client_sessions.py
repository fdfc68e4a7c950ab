"""What a controller knows of a client whose session has ended."""

from __future__ import annotations

import asyncio
import math

import msgspec
import pytest

from tests.unit.control.build import fetch, put, rows
from transfer_queue.config.document import validate_document
from transfer_queue.config.processes import ControllerConfig
from transfer_queue.control.core import ControlCore
from transfer_queue.errors import SamplerError
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.controller import Controller
from transfer_queue.sampler import GRPOGroupNSampler
from transfer_queue.wire.messages import Hello, Welcome


async def test_a_client_that_returns_after_its_session_ended_completes_its_group_and_another_does_not() -> None:
    core = ControlCore(sampler=GRPOGroupNSampler(4))
    controller = Controller(
        validate_document(ControllerConfig, {"name": "q"}, "test"), core, asyncio.get_running_loop()
    )

    def welcomed(hello: Hello) -> tuple[Connection, Welcome]:
        connection = Connection(controller, msgspec.msgpack.Decoder(), Keepalive(60.0, 60.0))
        return connection, controller.welcome(connection, hello)

    connection, first = welcomed(Hello("client", "worker"))
    core.apply(put("p", 2, "x", block=1), 0.0, client=first.writer)
    controller.gone(connection)
    (ended,) = controller.clients.expired(math.inf)
    core.client_gone(ended.writer, 0.0)
    _, second = welcomed(Hello("client", "worker", writer=first.writer, run=first.run))
    assert second.writer != first.writer
    core.apply(put("p", 4, "x", block=2), 0.0, client=second.writer)
    assert rows(core.apply(fetch("p", "x", 4), 0.0)) == [0, 1, 2, 3]
    _, other = welcomed(Hello("client", "other"))
    core.apply(put("p", 2, "x", block=3), 0.0, client=other.writer)
    with pytest.raises(SamplerError, match="begun by one client and continued by another"):
        core.apply(fetch("p", "x", 4), 0.0)
    await controller.close()
