"""What pods of queues answer over HTTP holds up no worker of the operator, whatever it is."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from tq_operator.runtime import fetch as module
from tq_operator.runtime.fetch import fetch

HEAD = b"HTTP/1.1 200 OK\r\n"


@contextmanager
def server(answer: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """A server of one connection that ``answer`` writes to, until the event is set."""
    over = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            with suppress(OSError):  # the other side has had enough
                answer(connection, over)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
        over.set()
        thread.join()


def dripping(begin: bytes, drop: bytes) -> Callable[[socket.socket, threading.Event], None]:
    def answer(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(begin)
        while not over.wait(0.02):
            connection.sendall(drop)

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        dripping(HEAD + b"Content-Length: 1000000\r\n\r\n", b"x"),
        dripping(HEAD + b"\r\n", b"x"),
        dripping(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        dripping(HEAD, b"X-A: b\r\n"),
        dripping(b"", b"x"),
    ],
)
def test_an_answer_that_comes_byte_by_byte_is_given_up(
    answer: Callable[[socket.socket, threading.Event], None],
) -> None:
    with server(answer) as url, pytest.raises((OSError, http.client.HTTPException)):
        fetch(url, timeout=0.2)


def test_an_endless_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST", 1 << 16)

    def answer(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(HEAD + b"\r\n")
        while not over.is_set():
            connection.sendall(b"x" * 65536)

    with server(answer) as url, pytest.raises(OSError, match="more than 65536 bytes"):
        fetch(url, timeout=20)


def test_a_part_of_an_answer_is_none() -> None:
    answer = HEAD + b"Content-Length: 9\r\n\r\n12345"
    with server(lambda each, _: each.sendall(answer)) as url, pytest.raises(http.client.IncompleteRead):
        fetch(url)


def test_an_answer_that_leads_elsewhere_is_not_followed() -> None:
    head = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/secret\r\nContent-Length: 2\r\n\r\nno"
    with server(lambda each, _: each.sendall(head)) as url:
        assert fetch(url) == (302, b"no")


@pytest.mark.parametrize("url", ["http://@:80/health", "http:///health", "http://host:99999/health"])
def test_an_address_that_is_none_is_an_error(url: str) -> None:
    with pytest.raises(ValueError, match=r"names no host|[Pp]ort"):
        fetch(url)
