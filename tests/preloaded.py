"""Python processes that start with torch and tensordict in memory: the import costs 3 s of CPU, a fork 0.1 s.

``Popen`` and ``run`` take the arguments of their namesakes in ``subprocess`` for a command
``[sys.executable, "-c" CODE | "-m" MODULE | SCRIPT, …]``. The process is a child of the caller as any other: it has its
own pid, pipes, environment and working directory, and can be stopped and killed. Nothing of the product is loaded
before it starts, but for the modules of its own servers. ``/proc/PID`` shows the environment and the command line of
what it was forked from. A test of these, of what an import does, or of a process's own memory starts a new interpreter
with ``subprocess`` instead.

A *nursery* makes them: one process of each process of tests, which has imported what they share and has one thread.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from transfer_queue.launch import process

ROOT = Path(__file__).resolve().parents[1]
PR_SET_CHILD_SUBREAPER = 36
AVAILABLE = sys.platform == "linux"


class _Nursery:
    """The process that is forked. Used by one thread at a time."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket
        self._adopt = ctypes.CDLL(None, use_errno=True).prctl if AVAILABLE else None

    def fork(self, request: dict[str, Any], files: Sequence[int]) -> int:
        """The pid of a new child of this process. ``files`` become its standard input, output and error."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            content = json.dumps(request).encode()
            assert self._adopt is not None
            # The nursery's child forks once more and ends: the grandchild then belongs to this process.
            self._adopt(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [len(content).to_bytes(4, "big")], list(files))
                self._socket.sendall(content)
                answer = self._socket.recv(16)
            finally:
                self._adopt(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise RuntimeError("the nursery of tests/preloaded.py has ended: its standard error says why")
        return int(answer)

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # no thread of its own, which a fork would lose
        environ.pop("PYTHONPATH", None)  # a program has its own
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.nursery", str(theirs.fileno()), *self._modules], cwd=ROOT, env=environ,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        atexit.register(self._end, os.getpid(), self._process, self._socket)

    @staticmethod
    def _end(owner: int, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        if os.getpid() == owner:
            connection.close()
            process.wait()


_OF_SERVERS = ("msgspec", "numpy", "prometheus_client", "psutil", "pydantic", "uvloop", "yaml")


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen`` for a Python program, forked from a process that has imported torch and tensordict."""

    _nursery = _Nursery(*_OF_SERVERS, "cloudpickle", "tensordict")

    def _execute_child(self, args: Any, *rest: Any) -> None:
        """Called by ``subprocess.Popen``, by position; the same from Python 3.10 to 3.13."""
        cwd, env = rest[4:6]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[9:15]
        words = [str(word) for word in args]
        if not AVAILABLE or words[0] != sys.executable or (words[1].startswith("-") and words[1] not in ("-c", "-m")):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        environ = dict(os.environ if env is None else env)
        request = {"argv": words[1:], "environ": environ, "cwd": str(cwd or os.getcwd()), "files": [0, 1, 2]}
        request["session"] = bool(rest[20])
        files = [p2cread if p2cread != -1 else 0, c2pwrite if c2pwrite != -1 else 1, errwrite if errwrite != -1 else 2]
        try:
            self.pid = self._nursery.fork(request, files)
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


class ServerPopen(Popen):
    """The same for a server of the product: it has neither torch nor tensordict, but what the servers import."""

    _nursery = _Nursery(*_OF_SERVERS, "transfer_queue.runtime.controller", "transfer_queue.runtime.storage_unit")


@contextlib.contextmanager
def servers() -> Iterator[None]:
    """Servers that the product starts in this process meanwhile are forked as well."""
    forked = SimpleNamespace(**{**vars(subprocess), "Popen": ServerPopen})
    with mock.patch.object(process, "subprocess", forked):
        yield


@contextlib.contextmanager
def spawns() -> Iterator[None]:
    """Processes that ``multiprocessing`` spawns from this one meanwhile are forked as a ``Popen`` is."""
    spawn = util.spawnv_passfds

    def fork(path: Any, args: Sequence[Any], files: Sequence[int]) -> int:
        if not AVAILABLE or os.fsdecode(args[1]) != "-c":
            return int(spawn(path, args, files))
        numbers = [0, 1, 2, *files]
        words = [os.fsdecode(word) for word in args[1:]]
        request = {"argv": words, "environ": dict(os.environ), "cwd": os.getcwd(), "files": numbers}
        return Popen._nursery.fork(request, numbers)

    with mock.patch.object(util, "spawnv_passfds", fork):
        yield


def run(
    args: Sequence[str],
    *,
    timeout: float | None = None,
    check: bool = False,
    capture_output: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run`` with ``Popen`` of this module."""
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with Popen(args, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            with contextlib.suppress(Exception):
                process.communicate()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
