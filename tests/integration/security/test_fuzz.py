"""Frames that hypothesis makes up, to real servers. ``TQ_FUZZ_FRAMES``: how many; ``make fuzz`` sends more."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.security.authority import policy_file, token_files
from tests.integration.security.servers import Servers, running
from transfer_queue.wire.frames import MAGIC
from transfer_queue.wire.messages import ControllerRequest, Envelope, Hello, Kind, UnitRequest

FRAMES = int(os.environ.get("TQ_FUZZ_FRAMES", "2400"))
_PER_CONNECTION = 40
_HEAD = struct.Struct("<IIQ")
_NAMES = sorted({kind.__name__ for kind in (*ControllerRequest.__args__, *UnitRequest.__args__)})
_FIELDS = ["partition", "block", "parts", "blocks", "nbytes", "wait_s", "scope", "indexes", "keys", "fields", "task",
           "batch_size", "append", "timeout_s", "tags", "token", "ticket", "writer", "most", "lease"]  # fmt: skip

_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=16),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
_bodies = st.builds(
    lambda name, rest: {"type": name, **rest},
    st.sampled_from(_NAMES),
    st.dictionaries(st.sampled_from(_FIELDS), _values, max_size=5),
)
_headers = st.one_of(
    st.binary(max_size=64),
    st.builds(
        lambda kind, request, total, body: msgspec.msgpack.encode([kind, request, total, body, 0]),
        st.integers(0, 6), st.integers(0, 9), st.sampled_from([0, 0, 0, 5, 2**41]), _bodies | _values,
    ),
)  # fmt: skip
_frames = st.builds(
    lambda header, payload, claimed: _HEAD.pack(MAGIC, len(header), claimed or len(payload)) + header + payload,
    _headers, st.sampled_from([b"", b"", b"12345"]), st.sampled_from([0, 0, 0, 2**41]),
)  # fmt: skip


@pytest.fixture(scope="module", params=["open", "limited"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Servers, Path]]:
    folder = tmp_path_factory.mktemp(request.param)
    tokens = {"tokensFile": token_files(folder), "tokenFile": str(folder / "storage.token")}
    security = {**tokens, "policyFile": policy_file(folder)} if request.param == "limited" else {}
    with running(folder, security) as found:
        yield found, folder


def _send(address: str, token: str, frames: list[bytes]) -> None:
    host, port = address.rsplit(":", 1)
    hello = msgspec.msgpack.encode(Envelope(Kind.REQUEST, 1, 0, Hello("client", "fuzz", token=token)))
    with socket.create_connection((host, int(port)), timeout=60) as peer, suppress(OSError):  # it may hang up on us
        peer.sendall(_HEAD.pack(MAGIC, len(hello), 0) + hello)
        peer.recv(1 << 16)
        for frame in frames:
            peer.sendall(frame)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(1 << 16):
            pass


def test_made_up_frames_neither_end_a_server_nor_grow_it(servers: tuple[Servers, Path]) -> None:
    stack, folder = servers
    limited = (folder / "policy.yaml").exists()
    token = (folder / "b.token").read_text().strip() if limited else ""
    processes = [psutil.Process(server.process.pid) for server in (stack.controller, stack.unit)]

    @settings(max_examples=max(1, FRAMES // _PER_CONNECTION // 4), deadline=None, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.lists(_frames, min_size=_PER_CONNECTION, max_size=_PER_CONNECTION))
    def attack(frames: list[bytes]) -> None:
        _send(stack.address, token, frames)
        _send(str(stack.unit.ready["address"]), token, frames)

    attack()
    before = [process.memory_info().rss for process in processes]
    attack()
    attack()
    for process, rss in zip(processes, before, strict=True):
        assert process.is_running()
        assert process.memory_info().rss < rss + (32 << 20)
    client = {"tokenFile": str(folder / "a.token")} if limited else {}
    with stack.client(**client) as still:
        assert isinstance(still.get_partition_list(), list)
