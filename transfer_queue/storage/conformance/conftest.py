from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

import transfer_queue as tq
from transfer_queue.storage.conformance.blocks import BlockClient
from transfer_queue.storage.conformance.servers import Servers
from transfer_queue.storage.registry import backend_servers

_ALIASES = {"memory": "simple"}


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    name = request.config.getoption("--backend")
    kind = _ALIASES.get(name, name)
    directory = tmp_path_factory.mktemp("servers")
    with backend_servers(kind, directory) as settings:
        settings = {**settings, **request.config.getoption("--backend-settings")}
        running = Servers(kind, settings, directory)
        try:
            yield running
        finally:
            running.stop()


@pytest.fixture
def blocks(servers: Servers) -> Iterator[BlockClient]:
    """A client of its own for each test: what the test leaves behind goes with it."""
    client = BlockClient(servers.address)
    yield client
    client.close()


@pytest.fixture
def queue(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """This process attached to the queue with ``transfer_queue.init``."""
    monkeypatch.setenv("TQ_PUT_WAIT", "30")
    tq.init({"controller": {"addresses": [servers.address]}, "security": {"allowPickle": False}})
    yield servers
    tq.close()


@pytest.fixture
def partition() -> str:
    return uuid.uuid4().hex
