"""Bytes that no client sends, to both kinds of server: they live, memory stays flat, others notice nothing."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import psutil
import pytest
import torch

import transfer_queue as tq
from tests.integration.stack import Process, Stack
from tests.waiting import wait_until
from transfer_queue.wire.frames import MAGIC
from transfer_queue.wire.messages import Alloc, Envelope, Hello, Kind, Put

HEAD = struct.Struct("<IIQ")
encode = msgspec.msgpack.encode


def frame(
    header: bytes, payload: bytes = b"", header_bytes: int | None = None, payload_bytes: int | None = None
) -> bytes:
    claimed = (header_bytes or len(header), payload_bytes or len(payload))
    return HEAD.pack(MAGIC, *claimed) + header + payload


HELLO = frame(encode(Envelope(Kind.REQUEST, 1, 0, Hello("client", "stranger"))))


def attacks() -> Iterator[bytes]:
    chance = random.Random(1)
    yield chance.randbytes(200_000)
    yield HELLO[:7]
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield frame(b"", header_bytes=2**32 - 1)
    yield frame(b"x" * 100, header_bytes=16 << 20)
    yield frame(b"\x91" * 100_000)
    yield frame(b"\xdd\xff\xff\xff\xff")
    yield frame(encode([0, 1, -5, None, 0]))
    yield frame(encode([77, 1, 0, None, 0]))
    yield frame(encode([0, 1, 0, {"type": "Hello", "role": "client", "client_id": "\0"}]).replace(b"\0", b"\xff"))
    yield HELLO + frame(encode(Envelope(Kind.REQUEST, 2, 2**41, Put(5, 0.0))), payload_bytes=2**41)
    yield HELLO + frame(encode(Envelope(Kind.REQUEST, 2, 0, Alloc(5, 2**50, 0.0))))
    yield HELLO + frame(encode([0, 2, 0, {"type": "Commit", "partition": "p", "append": 2**27}, 0]))
    sound = HELLO + frame(encode(Envelope(Kind.REQUEST, 2, 8, Put(7, 0.0))), b"12345678")
    for _ in range(50):
        damaged = bytearray(sound)
        for _ in range(4):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        yield bytes(damaged)


def dial(server: Process) -> socket.socket:
    host, port = server.ready["address"].rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=10)


def size(server: Process) -> tuple[int, int]:
    process = psutil.Process(server.process.pid)
    return process.memory_info().rss, process.num_fds()


@pytest.mark.parametrize("role", ["controller", "unit"])
def test_garbage_neither_ends_a_server_nor_grows_it(queue: Stack, partition: str, role: str) -> None:
    server = queue.controller if role == "controller" else queue.units[0]
    tq.kv_put("a", partition, {"x": torch.arange(3)})
    rss, descriptors = size(server)
    peers = []
    for data in attacks():
        peers.append(dial(server))
        with suppress(OSError):  # it may hang up in the middle
            peers[-1].sendall(data)
    status, _ = server.http("/healthz")  # answered after what came before
    assert status == 200
    assert size(server)[0] < rss + (64 << 20)
    for peer in peers:
        peer.close()
    wait_until(lambda: size(server)[1] <= descriptors, "the server let go of every connection")
    assert tq.kv_batch_get("a", partition)["x"][0].tolist() == [0, 1, 2]
    assert "Fatal error" not in server.log.read_text()


def test_a_malformed_request_fails_alone_and_its_connection_goes_on(queue: Stack) -> None:
    with dial(queue.controller) as peer, peer.makefile("rb") as answers:
        peer.sendall(HELLO)
        bodies = [{"type": "ListKeys", "partition": 5}, {"type": "ListKeys", "partition": "\0"}, {"type": "Nothing"}]
        for number, body in enumerate(bodies, 2):
            peer.sendall(frame(encode([0, number, 0, body, 0])))
        peer.sendall(frame(encode([0, 9, 0, {"type": "ListPartitions", "partition": ""}, 0])))
        kinds = {}
        while 9 not in kinds:
            _, header_bytes, _ = HEAD.unpack(answers.read(HEAD.size))
            kind, request, _, body, *_ = msgspec.msgpack.decode(answers.read(header_bytes))
            if kind == Kind.REPLY:
                kinds[request] = body["type"]
    assert kinds == {1: "Welcome", 2: "Failure", 3: "Value", 4: "Failure", 9: "Value"}
