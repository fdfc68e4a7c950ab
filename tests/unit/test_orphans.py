"""What tests start ends with them, also where their whole process group is killed."""

from __future__ import annotations

import os
import signal
import sys

import psutil

from tests import orphans, preloaded
from tests.waiting import wait_until

PROGRAM = """
import os, signal, subprocess
from tests import orphans
os.setsid()
orphans.watch()
started = [subprocess.Popen(["sleep", "600"], start_new_session=apart) for apart in (False, True)]
print(*(each.pid for each in started), flush=True)
os.killpg(0, signal.SIGKILL)
"""


def test_processes_end_with_a_killed_run_though_they_have_a_session_of_their_own() -> None:
    environ = {name: value for name, value in os.environ.items() if name != orphans.VARIABLE}
    command = [sys.executable, "-c", PROGRAM]
    with preloaded.Popen(command, env=environ, cwd=preloaded.ROOT, stdout=-1) as run:
        pids = [int(word) for word in run.communicate()[0].split()]
    assert run.returncode == -signal.SIGKILL
    assert len(pids) == 2
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "both have ended")
