"""Blocks between processes that have no queue in common. No Ray cluster takes part."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from tests.waiting import wait_until
from transfer_queue.errors import StartError
from transfer_queue.ray import exchange as exchange_module
from transfer_queue.ray.exchange import CAPACITY_VARIABLE, Exchange
from transfer_queue.runtime.block_server import BlockServer
from transfer_queue.storage.conformance.blocks import block_of_bytes


def _of_arenas() -> tuple[int, int]:
    """(maps, descriptors) of memory without a name that this process has."""
    maps = sum("memfd:tq-arena" in line for line in Path("/proc/self/maps").read_text().splitlines())
    descriptors = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder's own, or another thread's
            descriptors += "memfd:tq-arena" in os.readlink(entry)
    return maps, descriptors


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _left_in_child(descriptors: list[int]) -> str:
    """What a forked child has of arenas, and of ``descriptors``."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, f"{_of_arenas()} {[each for each in descriptors if _is_open(each)]}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


def test_a_forked_child_has_nothing_open_of_what_its_parent_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAPACITY_VARIABLE, "8Mi")
    held = Exchange("127.0.0.1")
    place = held.put(block_of_bytes(1 << 20))
    assert held._server is not None
    assert held._server._gate is not None
    listening = [each.fileno() for each in held._server._gate._listening]
    assert all(_of_arenas())
    assert _left_in_child(listening) == "(0, 0) []"
    held.get(place).release()  # the parent goes on


def test_processes_that_ended_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAPACITY_VARIABLE, "8Mi")
    held, reader = Exchange("127.0.0.1"), Exchange("127.0.0.1")
    place = held.put(block_of_bytes(1 << 20))
    for _ in range(2):
        reader.get(place).release()
    assert list(reader._peers) == [place.address]
    assert held._server is not None
    held._io.wait(held._server.close())
    wait_until(lambda: not reader._peers, "the reader forgets the process")


def test_a_process_that_cannot_listen_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise StartError("no port is free")

    monkeypatch.setenv(CAPACITY_VARIABLE, "8Mi")
    monkeypatch.setattr(BlockServer, "listen", fail)
    before = _of_arenas()
    held = Exchange("127.0.0.1")
    with pytest.raises(StartError):
        held.put(block_of_bytes(1 << 20))
    assert all(now <= then for now, then in zip(_of_arenas(), before, strict=True))


def test_the_limit_of_the_container_bounds_what_a_process_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CAPACITY_VARIABLE, raising=False)
    monkeypatch.setattr(exchange_module, "left_of_groups", lambda: [100 << 20, 200 << 20])
    assert exchange_module._capacity() == 30 << 20
    monkeypatch.setattr(exchange_module, "left_of_groups", lambda: [-1])
    assert exchange_module._capacity() == 1 << 20
