"""Keeping a started stack: until a signal, until a command ends, or until one of its servers cannot start."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from transfer_queue.errors import ConfigError
from transfer_queue.launch.local import LocalStack
from transfer_queue.launch.process import ServerProcess

__all__ = ["Interrupted", "interruptible", "keep", "run_command"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COMMAND_STOP_S = 10.0


class Interrupted(BaseException):
    """A signal asked this process to end. Not an Exception, as KeyboardInterrupt is not."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def interruptible() -> None:
    """Turn the signals that end a process into :class:`Interrupted`, so that what was started is stopped."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    for number in _ENDING:
        signal.signal(number, interrupt)


def keep(stack: LocalStack, announce: Callable[[], None]) -> None:
    """Return when a signal asks to end; restart servers that end. Raises StartError if a server cannot start.

    ``announce`` is called once a signal does just that.
    """
    with _signals() as signals:
        announce()
        for _ in _news(stack, signals):
            if any(number in _ENDING for number in signals.received):
                return


def run_command(stack: LocalStack, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run ``command`` beside the stack and return its exit code, 128 + n if signal n ended it.

    Signals sent to this process are forwarded to it. Servers of the stack that end are restarted; if a server cannot
    start, the command is ended too and StartError raised. Raises ConfigError for a command that cannot be run.
    """
    with _signals() as signals:  # before the start, so that no end of the command is missed
        try:
            process = subprocess.Popen(command, env=dict(environ))
        except OSError as error:
            raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from None
        try:
            for _ in _news(stack, signals):
                for number in signals.received:
                    if number in _ENDING and not (number == signal.SIGINT and _terminal_signals_us()):
                        process.send_signal(number)
                if process.poll() is not None:
                    break
        finally:
            _end(process)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _terminal_signals_us() -> bool:
    """Whether a Ctrl-C at the terminal reaches the command by itself, being in this foreground group."""
    with contextlib.suppress(OSError):
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_COMMAND_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _news(stack: LocalStack, signals: _Signals) -> Iterator[None]:
    """Yield after each signal (at least one at once). Raises StartError if a server cannot be restarted."""
    watched: set[ServerProcess] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(signals.wakeup, selectors.EVENT_READ)
        while True:
            serving = {process for process in stack.processes if process.failure() is None}
            for process in watched - serving:
                selector.unregister(process)
            for process in serving - watched:
                selector.register(process, selectors.EVENT_READ)  # its standard output ends with it
            watched = serving
            signals.collect()
            yield
            selector.select(timeout=1.0)  # seconds: the master has no pipe, and restarts are due without an event
            stack.restart_ended()


class _Signals:
    """Signals as bytes on a socket, as :func:`signal.set_wakeup_fd` gives them."""

    def __init__(self, wakeup: socket.socket) -> None:
        self.wakeup = wakeup
        self.received: list[int] = []

    def collect(self) -> None:
        try:
            self.received = list(self.wakeup.recv(4096))
        except BlockingIOError:
            self.received = []


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    numbers = (*_ENDING, signal.SIGCHLD)
    previous = {number: signal.signal(number, lambda number, frame: None) for number in numbers}
    before = signal.set_wakeup_fd(writer.fileno())
    try:
        yield _Signals(reader)
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in previous.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()
