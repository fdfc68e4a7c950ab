"""Requests that are nearly right, by the thousands over each connection. ``TQ_FUZZ_FRAMES``: how many in all."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import psutil
import pytest

from tests.integration.security.authority import policy_file, token_files
from tests.integration.security.servers import Servers, running
from tests.integration.security.test_access import CONTROLLER_REQUESTS, UNIT_REQUESTS
from transfer_queue.control import commands
from transfer_queue.control.schema import FieldSchema
from transfer_queue.wire import messages as wire
from transfer_queue.wire.frames import MAGIC

FRAMES = int(os.environ.get("TQ_FUZZ_FRAMES", "8000"))
SEED = int(os.environ.get("TQ_FUZZ_SEED") or random.SystemRandom().randrange(10**6))
_BATCH = 400
_GROWTH = 32 << 20
_HEAD = struct.Struct("<IIQ")
_LAST = 1 << 20
"""Number of the request whose answer says that all before it were read."""
_PARTITIONS = ["a/secret", "b/own", "", "\x00", "b/" + "x" * 300]
_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**32, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, -1.5,
    1e308, float("inf"), float("-inf"), float("nan"), "", "x", "a/secret", "b/own", "\x00", "ü" * 100, b"", b"\x00" * 8,
    b"\xff" * 8, b"\xff" * 31, b"\x01" * 4096, [], {}, [[]], [None] * 9, [0] * 64, ["x", "x"], {"x": 1}, {"": {"": []}},
    [{"n": 1}], [[0, 2**63 - 1]],
]  # fmt: skip
_encode = wire.ENCODER.encode


def _plain(message: Any) -> Any:
    return msgspec.msgpack.decode(_encode(message))


class _Target:
    """One server: what is sent to it, and how it is asked whether it has read all of that."""

    def __init__(self, address: str, templates: list[Any], question: Any, cleanup: list[Any], token: str) -> None:
        host, port = address.rsplit(":", 1)
        self._address = host, int(port)
        self._templates = [_plain(template) for template in templates]
        self._end = b"".join(
            _frame(_encode(wire.Envelope(wire.Kind.REQUEST, number, 0, message)))
            for number, message in [*enumerate(cleanup, _LAST - len(cleanup)), (_LAST, question)]
        )
        self._hello = wire.Hello("client", "fuzz", token=token)

    def send(self, chance: random.Random, frames: int) -> socket.socket:
        """Over a connection of its own."""
        peer = socket.create_connection(self._address, timeout=120)
        hello = _frame(_encode(wire.Envelope(wire.Kind.REQUEST, 1, 0, self._hello)))
        peer.sendall(hello + b"".join(self._nearly_right(chance, 2 + number) for number in range(frames)) + self._end)
        return peer

    def wait(self, peer: socket.socket, chance: random.Random) -> None:
        """Until all was read. The last frame is one that may end the connection."""
        with peer:
            last = b""
            for last in _headers(peer):
                if msgspec.msgpack.decode(last)[1] == _LAST:
                    break
            else:
                raise AssertionError(f"TQ_FUZZ_SEED={SEED}: the server ended a connection after {last!r}")
            broken = bytearray(self._nearly_right(chance, _LAST + 1))
            for _ in range(chance.randrange(1, 4)):
                broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
            with suppress(OSError):  # it may hang up on us
                peer.sendall(broken)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(1 << 16):
                    pass

    def _nearly_right(self, chance: random.Random, number: int) -> bytes:
        body = chance.choice(self._templates)
        for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
            body = _changed(body, chance)
        payload = b"12345" if chance.random() < 0.1 else b""
        header = [wire.Kind.REQUEST, number, len(payload), body, chance.choice((0, 0, number, number + 5))]
        return _frame(msgspec.msgpack.encode(header), payload)


def _changed(value: Any, chance: random.Random) -> Any:
    """``value`` with something else somewhere in it."""
    if isinstance(value, dict) and value:
        name = chance.choice(list(value))
        if name == "type" and chance.random() < 0.8:
            return value
        if chance.random() < 0.05:
            return {other: item for other, item in value.items() if other != name}
        return {**value, name: _changed(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.7:
        place = chance.randrange(len(value))
        return [*value[:place], _changed(value[place], chance), *value[place + 1 :]]
    return chance.choice(_VALUES)


def _frame(header: bytes, payload: bytes = b"") -> bytes:
    return _HEAD.pack(MAGIC, len(header), len(payload)) + header + payload


def _headers(peer: socket.socket) -> Iterator[bytes]:
    """Of the frames that come."""
    data = bytearray()
    while more := peer.recv(1 << 18):
        data += more
        start = 0
        while len(data) - start >= _HEAD.size:
            _, header, payload = _HEAD.unpack_from(data, start)
            end = start + _HEAD.size + header + payload
            if len(data) < end:
                break
            yield bytes(data[start + _HEAD.size : start + _HEAD.size + header])
            start = end
        del data[:start]


@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("limited", [False, True], ids=["open", "limited"])
def test_requests_that_are_nearly_right_neither_end_a_server_nor_grow_it(
    limited: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    tokens = {"tokensFile": token_files(folder), "tokenFile": str(folder / "storage.token")}
    security = {**tokens, "policyFile": policy_file(folder)} if limited else {}
    with running(folder, security) as servers:
        token = (folder / "b.token").read_text().strip() if limited else ""
        _attack(servers, token, random.Random(SEED), FRAMES // 2)
        client = {"tokenFile": str(folder / "a.token")} if limited else {}
        with servers.client(**client) as still:
            assert isinstance(still.get_partition_list(), list)


def _attack(servers: Servers, token: str, chance: random.Random, frames: int) -> None:
    block = 1 << 32
    controller = _Target(
        servers.address,
        [*(make("b/own") for make in CONTROLLER_REQUESTS.values()), commands.Commit("b/own", keys=["k"], tags=[{}]),
         commands.ListPartitions(""), wire.Join("u", "i", "h:1", 1),
         commands.Commit("b/own", append=1, fields=[FieldSchema("x", "dense", "float32", ())],
                         blocks=[commands.BlockRef(0, block, 0, 1, 5)])],
        commands.ListPartitions(""),
        [wire.Drain("unit-0", stop=True), *(commands.Clear(name) for name in _PARTITIONS)],
        token,
    )  # fmt: skip
    unit = _Target(
        str(servers.unit.ready["address"]),
        [*(make(block, "b/own") for make in UNIT_REQUESTS.values()), wire.Stats()],
        wire.Stats(),
        [],
        token,
    )
    processes = [psutil.Process(process.process.pid) for process in (servers.controller, servers.unit)]
    warm, sent, before = frames // 10, 0, [0, 0]
    started = time.monotonic()
    targets = [controller] if token else [controller, unit]  # a unit lets nobody in who has no ticket
    while sent < frames:
        if before == [0, 0] and sent >= warm:
            before = [process.memory_info().rss for process in processes]
        for target, peer in [(target, target.send(chance, _BATCH)) for target in targets]:
            target.wait(peer, chance)
            sent += _BATCH + 1
    took = time.monotonic() - started
    grown = [process.memory_info().rss - rss for process, rss in zip(processes, before, strict=True)]
    print(f"\nTQ_FUZZ_SEED={SEED}: {sent} frames, {sent / took:.0f} a second; grown by {[g >> 10 for g in grown]} KiB")
    assert all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    assert max(grown) < _GROWTH, f"TQ_FUZZ_SEED={SEED}: grown by {grown} bytes"
