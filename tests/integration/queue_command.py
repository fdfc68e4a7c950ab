"""``tq`` as a process in a world of its own: ports, state folder, and everything it starts accounted for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.integration.stack import ROOT

__all__ = ["QueueCommand", "free_ports"]


def free_ports(count: int) -> int:
    """The first of ``count`` consecutive ports that are free on all addresses."""
    while True:
        with ExitStack() as held, socket.socket() as probe:
            probe.bind(("", 0))
            first = int(probe.getsockname()[1])
            try:
                for port in range(first + 1, first + count):
                    held.enter_context(socket.socket()).bind(("", port))
            except (OSError, OverflowError):
                continue
        return first


def start_tq(environ: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    """``tq`` with these arguments; standard output and error are pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "transfer_queue.cli", *arguments],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class QueueCommand:
    """Runs ``tq`` with a resource of a queue called ``test``."""

    def __init__(self, folder: Path, backend: dict[str, Any]) -> None:
        ports = free_ports(11)
        self.said = ""
        """What ``tq up`` said, where a test keeps it."""
        self.file = folder / "queue.yaml"
        self.state = folder / "state"
        self.environ = {**os.environ, "XDG_STATE_HOME": str(self.state), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        self.environ.pop("TQ_CONFIG_FILE", None)
        if "mooncake" in backend:
            small = {"tensorBufferSize": "16Mi", "bytesBufferSize": "16Mi"}
            backend = {
                "mooncake": {
                    "protocol": "tcp",
                    "globalSegmentSize": "32Mi",
                    "localBufferSize": "16Mi",
                    "zeroCopy": {
                        **small,
                        **{f"controller{name[0].upper()}{name[1:]}": size for name, size in small.items()},
                    },
                    "master": {"rpcPort": ports + 6, "httpMetadataPort": ports + 7, "metricsPort": ports + 8},
                    **backend["mooncake"],
                }
            }
        self.resource: dict[str, Any] = {
            "apiVersion": "transferqueue.io/v1alpha1",
            "kind": "TransferQueue",
            "metadata": {"name": "test"},
            "spec": {
                "backend": backend,
                "controller": {"port": ports, "metricsPort": ports + 1},
                "storage": {"replicas": 2, "port": ports + 2, "metricsPort": ports + 4, "capacity": "16Mi"},
            },
        }
        self.write()

    def write(self) -> None:
        """Write the resource as it is now."""
        self.file.write_text(yaml.safe_dump(self.resource))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """See ``start_tq``."""
        return start_tq(self.environ, *arguments)

    def run(self, *arguments: str, timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
        """``tq`` with these arguments, to its end."""
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def up(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """``tq up`` with a command."""
        return self.run("up", "-f", str(self.file), "--", *command, **options)

    def processes(self) -> list[psutil.Process]:
        """Everything that was started from here and still runs: the environment tells."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("XDG_STATE_HOME") == str(self.state):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def named(self, part: str) -> psutil.Process:
        """The running process whose command line contains ``part``."""
        return next(process for process in self.processes() if part in " ".join(process.cmdline()))
