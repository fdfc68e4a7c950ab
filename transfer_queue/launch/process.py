"""One server as a child process: started, waited for until it serves, watched, stopped."""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from transfer_queue.config.document import Document
from transfer_queue.errors import StartError

__all__ = ["ServerProcess", "Startable", "stop_all", "wait_until_serving", "write_private"]

_STOP_S = 10.0
"""Time that a server has to end after SIGTERM before it is killed."""


class Startable(Protocol):
    """A child process that says when it serves."""

    name: str

    def fileno(self) -> int:
        """A descriptor that is readable when there is news: the server serves, or it ended."""

    def advance(self) -> bool:
        """Look at the news; True once it serves. Raises StartError if it ended instead."""

    def failure(self) -> str | None:
        """Reason why it has ended, in one line; None while it runs."""

    def terminate(self) -> None:
        """Ask it to end. Idempotent."""

    def wait(self, timeout_s: float) -> None:
        """Wait for its end, kill it after ``timeout_s`` seconds. Idempotent."""


class ServerProcess:
    """``python -m module --config FILE --die-with-parent``.

    Its standard input is a pipe that only this process holds, so that the child ends even if this process is killed.
    It runs in a session of its own, so that a Ctrl-C at the terminal reaches only this process, which then stops its
    servers in order. Its log goes to ``directory/name.log``; the last line of it is the cause of an early end.
    """

    def __init__(self, name: str, module: str, config: Document, directory: Path) -> None:
        """Start the process; it serves once :meth:`advance` says so. Raises StartError."""
        self.name = name
        self.address: dict[str, Any] = {}
        """The server's message when it was ready: ``address`` and others."""
        self.log = directory / f"{name}.log"
        self._printed = b""
        self._words: str | None = None
        path = directory / f"{name}.json"
        write_private(path, msgspec.json.format(msgspec.json.encode(config.dump())))
        with self.log.open("ab") as log:  # append to the log of the previous process
            self._said_before = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, "--config", str(path), "--die-with-parent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # where samplers come from
                start_new_session=True,
            )
        _started.add(self)

    def let_go(self) -> None:
        """Close the copy of the pipe that a forked child has, so that the server ends with the parent."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def advance(self) -> bool:
        chunk = os.read(self.fileno(), 65536)
        if not chunk:
            raise StartError(f"{self.name} did not start: {self._last_words()}")
        self._printed += chunk
        for line in self._printed.split(b"\n")[:-1]:
            if line.startswith(b"READY "):
                self.address = json.loads(line.removeprefix(b"READY "))
                return True
        return False

    def poll_ready(self) -> bool:
        """Whether the server serves, without waiting. A server that ended does not; see ``failure``."""
        if not select.select([self.fileno()], [], [], 0)[0]:
            return False
        try:
            return self.advance()
        except StartError:
            return False

    def failure(self) -> str | None:
        if self._process.poll() is None:
            return None
        return f"{self.name} {'ended' if self.address else 'did not start'}: {self._last_words()}"

    def wait_for_end(self) -> str:
        """Block until it has ended on its own or was terminated; why, in one line. Only once it serves."""
        self._read_to_end()
        return f"{self.name} ended: {self._last_words()}"

    def _read_to_end(self) -> None:
        while chunk := os.read(self.fileno(), 65536):
            self._printed += chunk

    def _last_words(self) -> str:
        if self._words is None:
            self._words = self._read_last_words()
        return self._words

    def _read_last_words(self) -> str:
        code = self._process.wait(_STOP_S)
        self._read_to_end()
        for line in self._printed.split(b"\n"):
            if line.startswith(b"ENDED "):
                return " ".join(str(json.loads(line.removeprefix(b"ENDED "))["error"]).split())
        said = self.log.read_bytes()[self._said_before :].decode(errors="replace")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        if code < 0:
            return f"killed by {signal.Signals(-code).name}; its log is {self.log}"
        return lines[-1].removeprefix("error: ") if lines else f"exit code {code} and no message"

    def terminate(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


_started: weakref.WeakSet[ServerProcess] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for server in list(_started):
        server.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can ever read. Raises StartError if it cannot be written.

    The file stays as it is if it has this content: a server restarts on a full disk too.
    """
    try:
        if path.is_file() and not path.is_symlink() and path.read_bytes() == content:
            return
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # half a file is worse than none
        raise StartError(
            f"cannot write {path}: {error.strerror}; make room, or set XDG_STATE_HOME to a folder with room"
        ) from None


def wait_until_serving(servers: Iterable[Startable], timeout_s: float) -> Iterable[Startable]:
    """Yield each server as it starts to serve. Raises StartError for the first that fails or is not ready in time."""
    deadline = time.monotonic() + timeout_s
    waiting = {server.fileno(): server for server in servers}
    with selectors.DefaultSelector() as selector:
        for descriptor in waiting:
            selector.register(descriptor, selectors.EVENT_READ)
        while waiting:
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                names = ", ".join(server.name for server in waiting.values())
                raise StartError(f"{names} not ready after {timeout_s:g} s; see the logs, or allow more time")
            for key, _ in events:
                if waiting[key.fd].advance():
                    selector.unregister(key.fd)
                    yield waiting.pop(key.fd)


def stop_all(servers: Iterable[Startable]) -> None:
    """End all of them: the ask goes to all first, then each is waited for."""
    listed = list(servers)
    for server in listed:
        server.terminate()
    deadline = time.monotonic() + _STOP_S
    for server in listed:
        server.wait(max(0.1, deadline - time.monotonic()))
