"""What TLS costs between two processes of this machine: ``python -m bench.tls``.

The same bytes go through plain and encrypted connections: blocking sockets of the standard library, which is the least
that Python can do, and the library's own connections. Processor time counts, in milliseconds for 10**9 bytes on each
side: with it one knows what a core carries, whatever else the machine does. The cipher alone is the part of it that
nothing in software saves.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from transfer_queue.config.security import PeerSecurity, ServerSecurity, TlsFiles
from transfer_queue.launch.certificates import issue, new_authority, server_names
from transfer_queue.runtime.connect import connect
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.process import new_event_loop
from transfer_queue.runtime.server import Server
from transfer_queue.runtime.tls import Credentials, listen_context
from transfer_queue.storage.base import UnitStats
from transfer_queue.wire import messages as wire

_MESSAGE = 64 << 20
_RECORD = 16 << 10
_TARGET = memoryview(bytearray(_MESSAGE))


def cipher(messages: int) -> float:
    """ms/GB of AES-256-GCM in records of TLS's size."""
    sealed, data = AESGCM(bytes(32)), bytes(_RECORD)
    began = time.process_time()
    for number in range(messages * (_MESSAGE // _RECORD)):
        sealed.encrypt(number.to_bytes(12, "little"), data, None)
    return _per_gb(time.process_time() - began, messages)


def sockets(files: TlsFiles | None, messages: int) -> tuple[float, float, float]:
    """GB/s, and ms/GB of sender and receiver, over blocking sockets."""

    def receive(pipe: Pipe) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pipe.send(listener.getsockname()[1])
            accepted, _ = listener.accept()
        context = listen_context(ServerSecurity(tls=files))
        with accepted if context is None else context.wrap_socket(accepted, server_side=True) as end:
            began, left = time.process_time(), messages * _MESSAGE
            while left:
                offset = -left % _MESSAGE
                left -= end.recv_into(_TARGET[offset : offset + left])
            pipe.send(time.process_time() - began)

    def send(port: int) -> Callable[[], None]:
        plain = socket.create_connection(("127.0.0.1", port))
        context = Credentials(PeerSecurity(tls=files)).context()
        end = plain if context is None else context.wrap_socket(plain, server_hostname="127.0.0.1")

        def run() -> None:
            with end:
                for _ in range(messages):
                    end.sendall(_TARGET)

        return run

    return _measure(receive, send, messages)


class _Sink(Server):
    """Takes each payload into the same memory."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.came, self.left = asyncio.Event(), asyncio.Event()

    def welcome(self, connection: Connection, hello: wire.Hello) -> wire.Welcome:
        connection.context = self
        self.came.set()
        return wire.Welcome("unit")

    def serve(self, connection: Connection, request: int, body: Any, payload: memoryview | None, floor: int) -> None:
        connection.reply(request, wire.Stored(UnitStats(0, 0, 0)))

    def receive_buffer(self, connection: Connection, body: Any, nbytes: int) -> memoryview | None:
        return _TARGET[:nbytes]

    def gone(self, connection: Connection) -> None:
        self.left.set()


class _Source:
    def on_request(self, *_: Any) -> None: ...
    def on_notice(self, *_: Any) -> None: ...
    def on_lost(self, *_: Any) -> None: ...
    def receive_buffer(self, *_: Any) -> None: ...


def connections(files: TlsFiles | None, messages: int) -> tuple[float, float, float]:
    """As ``sockets``, over the library's connections."""

    def receive(pipe: Pipe) -> None:
        async def run() -> None:
            server = _Sink(msgspec.msgpack.Decoder(wire.Envelope[wire.UnitRequest]), Keepalive(2.0, 60.0))
            await server.listen("127.0.0.1", 0, "127.0.0.1", ServerSecurity(tls=files))
            pipe.send(int(server.address.rpartition(":")[2]))
            await server.came.wait()
            began = time.process_time()
            await server.left.wait()
            pipe.send(time.process_time() - began)
            await server.close()

        new_event_loop().run_until_complete(run())

    def send(port: int) -> Callable[[], None]:
        loop = new_event_loop()
        decoder = msgspec.msgpack.Decoder(wire.Envelope[wire.UnitReply])
        hello, security = wire.Hello("client", "bench"), Credentials(PeerSecurity(tls=files))
        arguments: dict[str, Any] = {"what": "sink", "timeout_s": 60.0, "credentials": security}

        async def attach() -> Connection:
            address = f"127.0.0.1:{port}"
            return await connect(address, hello, _Source(), decoder, Keepalive(2.0, 60.0), **arguments)

        connection = loop.run_until_complete(attach())

        async def put() -> None:
            for _ in range(messages):
                await connection.request(wire.Fill(1), [_TARGET], timeout_s=600.0)
            connection.close()

        return lambda: loop.run_until_complete(put())

    return _measure(receive, send, messages)


def _measure(
    receive: Callable[[Pipe], None], send: Callable[[int], Callable[[], None]], messages: int
) -> tuple[float, float, float]:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=receive, args=(theirs,))
    child.start()
    run = send(ours.recv())
    began, busy = time.perf_counter(), time.process_time()
    run()
    busy = time.process_time() - busy
    received = ours.recv()
    seconds = time.perf_counter() - began
    child.join()
    return messages * _MESSAGE / 1e9 / seconds, _per_gb(busy, messages), _per_gb(received, messages)


def _per_gb(seconds: float, messages: int) -> float:
    return 1000 * seconds / (messages * _MESSAGE / 1e9)


def certificate(folder: Path) -> TlsFiles:
    """For both sides, from an authority of its own."""
    now, life = datetime.now(timezone.utc), timedelta(days=1)
    authority = new_authority("bench CA", now, life)
    made = issue(authority, "bench", server_names(["127.0.0.1"]), now, life, server=True)
    for name, content in (("ca", authority.certificate), ("crt", made.certificate), ("key", made.key)):
        (folder / name).write_bytes(content)
    return TlsFiles(ca=str(folder / "ca"), certificate=str(folder / "crt"), key=str(folder / "key"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=30, help="of 64 MiB, each way of each round")
    parser.add_argument("--rounds", type=int, default=3, help="the least processor time of them counts")
    options = parser.parse_args()
    print(f"{ssl.OPENSSL_VERSION}, {os.cpu_count()} cores")
    print(f"AES-256-GCM alone: {min(cipher(options.messages) for _ in range(options.rounds)):.0f} ms/GB")
    with tempfile.TemporaryDirectory() as text:
        files = certificate(Path(text))
        for way in (sockets, connections):
            for name, chosen in (("plain", None), ("TLS", files)):
                rounds = [way(chosen, options.messages) for _ in range(options.rounds)]
                speeds, senders, receivers = zip(*rounds, strict=True)
                fastest, sender, receiver = max(speeds), min(senders), min(receivers)
                print(f"{way.__name__} {name}: {fastest:.2f} GB/s, sender {sender:.0f}, receiver {receiver:.0f} ms/GB")


if __name__ == "__main__":
    main()
