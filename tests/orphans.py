"""Ends what tests have started when their own process is gone, also when it was killed.

Processes of tests are known by a variable of their environment, which all that they start inherits. Run as a script in
a session of its own, ``orphans.py PID RUN``, this waits until process PID has ended and kills what is left of RUN.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid

VARIABLE = "TQ_TEST_RUN"
_watcher: subprocess.Popen[bytes] | None = None


def watch() -> None:
    """Start the watch over this process; the processes of a test run inside another one belong to the outer run."""
    global _watcher
    if VARIABLE in os.environ or sys.platform != "linux":
        return
    run = os.environ[VARIABLE] = uuid.uuid4().hex
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), run]
    quiet = subprocess.DEVNULL
    _watcher = subprocess.Popen(command, env=environ, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)


def _members(run: str) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                environ = file.read().split(b"\0")
        except OSError:
            continue  # it has ended, or belongs to another user
        if f"{VARIABLE}={run}".encode() in environ:
            found.append(int(name))
    return found


def _end(owner: int, run: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(owner)], [], [])
    for _ in range(200):  # again, for what they start meanwhile
        for pid in _members(run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not _members(run):
            break
        time.sleep(0.05)


if __name__ == "__main__":
    _end(int(sys.argv[1]), sys.argv[2])
