"""Peers without credentials at every port: they cost a server little, and shut nobody out."""

from __future__ import annotations

import socket
import ssl
import struct
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.integration.security.authority import Authority
from tests.integration.security.servers import Servers, running
from tests.integration.stack import Process
from tests.waiting import wait_until
from transfer_queue.wire.frames import HELLO_BYTES, MAGIC
from transfer_queue.wire.messages import Envelope, Hello, Kind

STRANGERS = 1000
"""More than a server keeps of one address."""
MIB = 1 << 20
TOKEN = "a-token-that-is-long-enough"
HEADER = struct.pack("<IIQ", MAGIC, 16 * MIB, 0)
TRICKLE = struct.pack("<IIQ", MAGIC, HELLO_BYTES, 0) + bytes(HELLO_BYTES - 1)


def dial(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=10)


def memory(server: Process) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss)


def use(servers: Servers, token: Path) -> None:
    """Attach, put and read, as a program does."""
    with servers.client(tokenFile=str(token)) as client:
        client.run(client.kv.put, ["a"], "p", None, [{"x": 1}], None)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    (tmp_path / "tokens").write_text(f"alice {TOKEN}\n")
    (tmp_path / "token").write_text(TOKEN)
    return tmp_path / "token"


def test_strangers_cost_a_server_little_and_shut_nobody_out(tmp_path: Path, token: Path) -> None:
    with running(
        tmp_path,
        {"tokensFile": str(tmp_path / "tokens")},
        {"tokensFile": str(tmp_path / "tokens"), "tokenFile": str(token)},
    ) as servers:
        use(servers, token)
        for server in (servers.controller, servers.unit):
            for address in (server.ready["address"], server.ready["metrics"]):
                before = memory(server)
                with ExitStack() as open_links:
                    for number in range(STRANGERS):
                        link = open_links.enter_context(dial(address))
                        with suppress(OSError):  # it may hang up on them
                            if number % 3 == 0:
                                link.sendall(HEADER + bytes(MIB))
                            elif number % 3 == 1:
                                link.sendall(TRICKLE)
                        if number % 300 == 299:
                            use(servers, token)
                    assert memory(server) - before < 32 * MIB
                    assert server.http("/healthz")[0] == 200
                    use(servers, token)
        assert servers.controller.http("/metrics")[1].count("tq_connections_refused_total{") == 5


def test_half_made_tls_connections_cost_little_and_their_memory_returns(tmp_path: Path) -> None:
    hello = half_a_handshake()
    with running(tmp_path, {"tls": Authority(tmp_path).issue("server")}) as servers:
        server = servers.controller
        after_first = 0
        for _ in range(3):
            before = memory(server)
            with ExitStack() as open_links:
                for _ in range(300):
                    open_links.enter_context(dial(servers.address)).sendall(hello)
                assert memory(server) - before < 32 * MIB
            wait_until(lambda: "tq_connections_pending 0.0" in server.http("/metrics")[1], "the strangers have left")
            after_first = after_first or memory(server)
        wait_until(lambda: memory(server) - after_first < 4 * MIB, "the memory returned")


def half_a_handshake() -> bytes:
    """The first flight of a TLS client."""
    sent = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


def test_who_does_not_say_in_time_who_it_is_has_to_go(tmp_path: Path, token: Path) -> None:
    with (
        running(tmp_path, {"tokensFile": str(tmp_path / "tokens")}, {"tokenFile": str(token)}) as servers,
        dial(servers.address) as link,
    ):
        link.settimeout(0.5)
        hello = struct.pack("<IIQ", MAGIC, HELLO_BYTES, 0)

        def trickled() -> bool:
            """A byte at a time, as a sign of life; the time is that of the whole Hello."""
            try:
                link.sendall(b"\0")
                return link.recv(1 << 16) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        link.sendall(hello)
        wait_until(trickled, "the server hung up")
        assert 'reason="late"} 1.0' in servers.controller.http("/metrics")[1]
        assert "did not say within 10 s who it is" in servers.controller.log.read_text()


def test_refusals_are_counted_and_logged_with_the_address_but_not_without_end(tmp_path: Path, token: Path) -> None:
    with running(tmp_path, {"tokensFile": str(tmp_path / "tokens")}, {"tokenFile": str(token)}) as servers:
        header = msgspec.msgpack.encode(Envelope(Kind.REQUEST, 1, 0, Hello("client", "eve", token="\x1b[2J" * 8)))
        wrong = struct.pack("<IIQ", MAGIC, len(header), 0) + header
        for data in (wrong, b"GET / HTTP/1.1\r\n\r\n"):
            for _ in range(30):
                with dial(servers.address) as link:
                    link.sendall(data)
                    with suppress(OSError):
                        while link.recv(1 << 16):
                            pass
            if data is wrong:
                assert "(credentials): the token is not one" in servers.controller.log.read_text()
        counts = servers.controller.http("/metrics")[1]
        assert 'reason="credentials"} 30.0' in counts
        assert 'reason="malformed"} 30.0' in counts
        lines = [line for line in servers.controller.log.read_text().splitlines() if "turned away" in line]
        assert 0 < len(lines) < 40
        assert "turned away 127.0.0.1:" in lines[0]
