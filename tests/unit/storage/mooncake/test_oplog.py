"""Which keys are in the log of several masters; a real one is in tests/integration/mooncake."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from transfer_queue.errors import ConnectionLostError
from transfer_queue.storage.mooncake import oplog
from transfer_queue.storage.mooncake.oplog import Follower, MasterLog, NoLogError, UnknownLogError

PREFIX = '{"schema_version":1,"batch_id":7,"last_seq":9}'


def batch(number: int, *entries: tuple[int, str]) -> str:
    return json.dumps([1, number, 1, len(entries), [[op, "default", key, "e30="] for op, key in entries], 12345])


@pytest.fixture
def etcd() -> Iterator[Callable[..., str]]:
    """``etcd(status, *values)``: the address of a member that answers each request with these values."""
    servers: list[HTTPServer] = []

    def start(status: int, *values: str) -> str:
        class Member(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                pairs = [{"value": base64.b64encode(value.encode()).decode()} for value in values]
                text = json.dumps({"kvs": pairs} if pairs else {}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Member)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def answer(members: str, ask: Callable[[MasterLog], Any]) -> Any:
    log = MasterLog(members, "c")
    try:
        return ask(log)
    finally:
        log.close()


def test_the_log_says_what_was_stored_and_not_what_was_removed(etcd: Callable[..., str]) -> None:
    member = etcd(200, batch(8, (1, "tq/r/1"), (3, "tq/r/2")), batch(9, (1, "tq/r/12")))
    assert answer(f"etcd://{member}", lambda log: log.stored(7)) == (9, ["tq/r/1", "tq/r/12"])
    assert answer(f"etcd://{etcd(200)}", lambda log: log.stored(7)) == (7, [])
    assert answer(f"etcd://{etcd(200, PREFIX)}", lambda log: log.last()) == 7


def test_a_member_that_is_away_is_passed_over(etcd: Callable[..., str]) -> None:
    members = f"etcd://127.0.0.1:1;{etcd(503)};{etcd(200, PREFIX)}"
    assert answer(members, lambda log: log.last()) == 7
    with pytest.raises(ConnectionLostError, match="etcd of the Mooncake masters does not answer"):
        answer(f"etcd://127.0.0.1:1;{etcd(503)}", lambda log: log.last())


@pytest.mark.parametrize(
    ("status", "value", "words"),
    [(200, [], "no log of masters with the cluster id c"), (404, [], "HTTP 404"), (200, ["\x00"], "not as that of")],
)
def test_a_log_that_cannot_be_read_is_told(etcd: Callable[..., str], status: int, value: list[str], words: str) -> None:
    with pytest.raises(UnknownLogError, match=words):
        answer(etcd(status, *value), lambda log: log.last())


class Written:
    """A log of batches that grows with each read."""

    def __init__(self, *batches: list[str] | Exception, last: int = 0) -> None:
        self.batches = list(batches)
        self.number = last
        self.asked: list[int] = []

    def last(self) -> int:
        return self.number

    def stored(self, after: int) -> tuple[int, list[str]]:
        self.asked.append(after)
        if not self.batches:
            return after, []
        found = self.batches.pop(0)
        if isinstance(found, Exception):
            raise found
        return after + bool(found), found


def follower(log: Written) -> Follower:
    async def run(job: Callable[[], Any]) -> Any:
        return job()

    return Follower(log, run)  # type: ignore[arg-type]


async def test_keys_are_awaited_until_the_log_has_them_all() -> None:
    log = Written(["b"], [], ["x", "a"], last=5)
    found = follower(log)
    await found.expect(["a", "b"])
    assert await found.missing(["a", "b"], 60) == []
    assert log.asked == [5, 6, 6]
    await found.expect(["c"])
    assert await found.missing(["c"], 0) == ["c"]
    found.forget(["c"])
    assert await found.missing(["c"], 60) == []


async def test_what_one_reads_of_the_log_serves_all() -> None:
    log = Written(["b", "a"])
    found = follower(log)
    await found.expect(["a"])
    await found.expect(["b"])
    assert await found.missing(["a"], 60) == []
    assert await found.missing(["b"], 60) == []
    assert len(log.asked) == 1


async def test_an_etcd_that_starts_again_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = follower(Written(ConnectionLostError("away"), ["a"]))
    await found.expect(["a"])
    assert await found.missing(["a"], 60) == []
    monkeypatch.setattr(oplog, "_PATIENCE_S", 0.0)
    found = follower(Written(ConnectionLostError("away"), ["a"]))
    await found.expect(["a"])
    with pytest.raises(ConnectionLostError):
        await found.missing(["a"], 60)


async def test_without_a_log_nothing_is_awaited_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    found = follower(Written(UnknownLogError("there is no log")))
    await found.expect(["a"])
    assert await found.missing(["a"], 60) == []
    assert "there is no log" in caplog.text
    await found.expect(["b"])
    assert await found.missing(["b"], 60) == []
    assert len(caplog.records) == 1


async def test_a_log_that_etcd_lost_is_read_from_its_new_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oplog, "_QUIET_S", 0.0)

    class StartedOver(Written):
        """A log whose first two batches after the loss are those of ``number``."""

        def last(self) -> int:
            if self.number < 0:
                raise NoLogError("there is no log")
            return self.number

        def stored(self, after: int) -> tuple[int, list[str]]:
            self.asked.append(after)
            return (2, ["a"]) if after < 2 else (after, [])

    log = StartedOver(last=70)
    found = follower(log)
    await found.expect(["a"])
    log.number = -1  # gone, and begun again only with the next key
    reading = found.missing(["a"], 60)
    log.number = 2
    assert await reading == []
    assert log.asked == [70, 0]
    log.number = -1
    monkeypatch.setattr(oplog, "_BEHIND_S", -1.0)
    await found.expect(["b"])
    assert await found.missing(["b"], 0) == ["b"], "keys are awaited as before"
