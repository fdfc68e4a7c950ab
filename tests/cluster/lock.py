"""One `up` or `down` at a time on a machine."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.errors import ClusterError

# An abstract socket: the kernel frees the name with the process, however it ends, and no file is left.
_NAME = "\0transferqueue-cluster"


@contextmanager
def exclusive() -> Iterator[None]:
    """Hold the machine's cluster lock. Raises ClusterError naming the process that holds it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
        try:
            lock.bind(_NAME)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ClusterError(
                f"another cluster command is at work on this machine ({_holder()}). Wait until it ends, then run again."
            ) from error
        lock.listen()
        yield


def _holder() -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(_NAME)
        except OSError:
            return "it has just ended"
        size = struct.calcsize("3i")
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return f"process {pid}"
