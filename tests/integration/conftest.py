from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

import transfer_queue as tq
from tests.integration.stack import Stack, running_stack
from transfer_queue.config.attach import AttachConfig, AttachSecurity, ControllerAddresses


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack(units=2, capacity="128Mi") as running:
        yield running


@pytest.fixture
def queue(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """This process attached to the module's stack."""
    monkeypatch.setenv("TQ_CONTROLLER_ADDRESS", stack.address)
    monkeypatch.setenv("TQ_PUT_WAIT", "0")
    tq.init({"security": {"allowPickle": True}, "controller": {"addresses": [stack.address]}})
    yield stack
    tq.close()


@pytest.fixture
def client(stack: Stack) -> Iterator[tq.TransferQueueClient]:
    """A client of its own, of the module's stack."""
    named = ControllerAddresses(addresses=[stack.address])  # by address alone, it would not unpickle
    made = tq.TransferQueueClient("tester", AttachConfig(controller=named, security=AttachSecurity(allow_pickle=True)))
    yield made
    made.close()


@pytest.fixture
def partition() -> str:
    """A name no other test uses."""
    return uuid.uuid4().hex
