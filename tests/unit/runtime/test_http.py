"""The HTTP port of a server: what peers that do not read cost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from transfer_queue.config.attach import Target
from transfer_queue.config.security import PeerSecurity
from transfer_queue.errors import ConfigError
from transfer_queue.runtime import long_answers
from transfer_queue.runtime.connect import connect
from transfer_queue.runtime.connection import Endpoint, Keepalive
from transfer_queue.runtime.http import StatusServer
from transfer_queue.runtime.metrics import Metrics
from transfer_queue.runtime.tls import Credentials
from transfer_queue.wire.messages import ControllerReply, Envelope, Hello

ANSWER = 8 << 20
PEERS = 8


async def _page(query: Mapping[str, str]) -> tuple[str, list[bytes]]:
    return "text/plain", [bytes(ANSWER)]


Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _asked(address: str, path: str = "page") -> Peer:
    """Ask for a page and read the head of its answer."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /%s HTTP/1.1\r\n\r\n" % path.encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    return reader, writer


async def _body(peer: Peer) -> int:
    """Bytes until the end of the connection."""
    (reader, writer), nbytes = peer, 0
    try:
        while piece := await reader.read(1 << 20):
            nbytes += len(piece)
    except ConnectionResetError:
        pass
    writer.close()
    return nbytes


def test_of_answers_that_nobody_reads_only_the_latest_are_kept() -> None:
    async def check() -> None:
        server = StatusServer(Metrics(lambda scrape: iter(())), lambda: "", {"/page": _page})
        await server.listen("127.0.0.1", 0, None)
        slow = [await _asked(server.address) for _ in range(PEERS)]
        assert await _body(await _asked(server.address)) == ANSWER
        found = [await _body(peer) for peer in slow]
        assert found[-1] == ANSWER
        assert all(nbytes < ANSWER for nbytes in found[:-2]), found
        server.close()

    asyncio.run(asyncio.wait_for(check(), 60))


def test_scrapes_leave_turns_to_others_and_those_of_one_time_share_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_answers, "_SLICE_S", 0.0)
    scrapes: list[bool] = []
    others_served = False

    def fill(scrape: Any) -> Iterator[None]:
        scrapes.append(others_served)
        while not others_served:
            yield
        for number in range(1000):
            scrape.add("tq_partition_rows", number, f"p{number}")
        scrape.add("tq_rows_put", 7)

    async def check() -> None:
        nonlocal others_served
        server = StatusServer(Metrics(fill), lambda: "")
        await server.listen("127.0.0.1", 0, None)
        asked = [asyncio.create_task(_asked(server.address, "metrics")) for _ in range(PEERS)]
        peers = [await _asked(server.address, "healthz")]
        others_served = True
        peers += await asyncio.gather(*asked)
        text = (await peers[-1][0].read()).decode()
        for _, writer in peers:
            writer.close()
        assert [line for line in text.splitlines() if line.startswith("tq_partition_rows")] == [
            f'tq_partition_rows{{partition="p{number}"}} {number}.0' for number in range(1000)
        ]
        assert text.count("# TYPE tq_partition_rows gauge\n") == 1
        assert "\ntq_rows_put_total 7.0\n" in text
        assert scrapes in ([False], [False, True])
        server.close()

    asyncio.run(asyncio.wait_for(check(), 60))


async def test_a_client_of_a_queue_is_told_that_this_is_a_page() -> None:
    server = StatusServer(Metrics(lambda scrape: iter(())), lambda: "")
    await server.listen("127.0.0.1", 0, None)
    endpoint = cast("Endpoint", SimpleNamespace(on_lost=lambda connection: None))
    credentials = Credentials(PeerSecurity(), Target(origin=f"TQ_CONTROLLER_ADDRESS={server.address}"))
    decoder = msgspec.msgpack.Decoder(Envelope[ControllerReply])
    try:
        with pytest.raises(ConfigError, match=r"serves HTTP.* page or of metrics .*TQ_CONTROLLER_ADDRESS=127"):
            await connect(
                server.address,
                Hello("client", "c"),
                endpoint,
                decoder,
                Keepalive(2.0, 60.0),
                what="controller",
                timeout_s=60.0,
                credentials=credentials,
            )
    finally:
        server.close()
