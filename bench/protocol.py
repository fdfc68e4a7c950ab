"""Peers are processes that speak JSON lines: one request in, one answer out.

A request is ``{"do": "workload.function", "options": {...}}``; the process calls ``bench.workloads.workload.function(
peer, options)`` and answers ``{"result": ...}`` or ``{"error": "..."}``. All timing happens inside the peer.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
OWN = ("ours", "machine")
"""How the names of peers begin that run in this checkout's environment and import its library."""


class PeerError(RuntimeError):
    """A peer answered with an error, ended, or did not answer in time."""


class PeerProcess:
    """The driver's end of one peer."""

    def __init__(self, name: str, python: str, *, attach: dict[str, Any] | None = None) -> None:
        """``attach``: join what another process of this peer started.

        Peers whose name begins as ``OWN`` says import this checkout's library. The others see the package ``bench``
        through a folder that holds nothing else, so that ``transfer_queue`` stays the one of their own environment.
        """
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="tq-bench-")
        folder = Path(self._folder.name)
        (folder / "bench").symlink_to(ROOT / "bench")
        self._log = folder / "log"
        path = [str(folder), *([str(ROOT)] if name.startswith(OWN) else [])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "RAY_DEDUP_LOGS": "0"}
        for variable in ("TQ_CONFIG_FILE", "TQ_CONTROLLER_ADDRESS"):
            environ.pop(variable, None)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-m", "bench.serve", name, json.dumps(attach)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environ,
                cwd=folder,
            )

    def send(self, do: str, **options: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, "options": options}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"{self.name} ended: {self._tail()}") from None

    def receive(self, timeout_s: float = 240.0) -> Any:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not readable:
            raise PeerError(f"{self.name} did not answer within {timeout_s:g} s: {self._tail()}")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self.name} ended: {self._tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer["result"]

    def call(self, do: str, timeout_s: float = 240.0, **options: Any) -> Any:
        self.send(do, **options)
        return self.receive(1800.0 if options.get("long") else timeout_s)

    def finish(self) -> None:
        """Let the peer end, without waiting for it."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):  # it has ended, with a request unread
                self._process.stdin.close()

    def stop(self) -> None:
        """End the peer; it takes down what it started. Killed if that takes longer than 30 s. Idempotent."""
        self.finish()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._folder.cleanup()

    def _tail(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").splitlines()[-8:])

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def answer_all(peer: object, requests: IO[str], answers: IO[str]) -> None:
    """The peer's end: answer until the driver closes the pipe."""
    for line in requests:
        request = json.loads(line)
        module, function = request["do"].split(".")
        answer: dict[str, Any]
        try:
            work = getattr(importlib.import_module(f"bench.workloads.{module}"), function)
            answer = {"result": work(peer, request["options"])}
        except Exception as error:  # noqa: BLE001 -- the boundary: whatever fails in a peer is the driver's answer
            traceback.print_exc(file=sys.stderr)
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def seconds(start: float) -> float:
    """Since ``start`` (``time.perf_counter``)."""
    return time.perf_counter() - start
