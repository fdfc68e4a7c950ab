"""Ends a process when its owner is gone. Run as a script: ``guard.py OWNER_PID`` with the other pid on stdin.

Signals on the owner's death that the kernel offers (PR_SET_PDEATHSIG) follow the thread that started the process, which
may end early; a descriptor of the owner does not.
"""

from __future__ import annotations

import os
import select
import signal
import sys

GRACE_S = 3.0


def watch(owner_pid: int, pid: int) -> None:
    """Return when ``pid`` has ended; end it when ``owner_pid`` has."""
    try:
        target = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        owner = os.pidfd_open(owner_pid)
        select.select([owner, target], [], [])
    except ProcessLookupError:
        pass
    for number in (signal.SIGTERM, signal.SIGKILL):
        if select.select([target], [], [], 0)[0]:
            return
        signal.pidfd_send_signal(target, number)
        select.select([target], [], [], GRACE_S)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the owner stops things in order
    line = sys.stdin.readline()
    if line.strip():
        watch(int(sys.argv[1]), int(line))


if __name__ == "__main__":
    main()
