"""The end of a connection to a group of masters.

To close a connection, the engine waits up to 30 s for its watch of the leader in etcd to expire. It holds the
interpreter meanwhile, so no thread of the program runs. The same happens at the exit of a process that did not close.
Such a connection is therefore left to the end of the process, and the engine's exit handler does not run. A client's
entries in the metadata store are removed when the interpreter ends. The master gives up the segment of a storage unit
when its process no longer pings, as for a killed process.
"""

from __future__ import annotations

import atexit
import ctypes
import socket
import threading
from pathlib import Path
from typing import Any

__all__ = ["leave"]

_ENTRIES = ("mooncake/ram/{}", "mooncake/rpc_meta/{}")
_lock = threading.Lock()
_left: dict[str, socket.socket] = {}


def leave(raw: Any, name: str, reserved: socket.socket, module_file: str) -> None:
    """Leave ``raw``, the engine's connection ``name``, to the end of the process.

    Args:
        raw: the engine's object; it must never be destroyed.
        name: ``host:port`` of the connection.
        reserved: holds that port, which stays this process's as long as its entries are in the store.
        module_file: file of the engine's module, beside which its library for etcd lies.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(raw))
    with _lock:
        _left[name] = reserved
        if len(_left) > 1:
            return
    atexit.register(_forget, str(Path(module_file).with_name("libetcd_wrapper.so")))
    libc = ctypes.CDLL(None)
    # Exit handlers run in reverse: this one, which ends the process with its exit status, runs before the engine's.
    libc.on_exit(libc._exit, None)


def _forget(library: str) -> None:
    """Remove the entries of the left connections from etcd."""
    try:
        engine = ctypes.CDLL(library)
        error = ctypes.c_char_p()
        for name in _left:
            for entry in _ENTRIES:
                engine.EtcdDeleteWrapper(entry.format(name).encode(), ctypes.byref(error))
    except (OSError, AttributeError):  # another build of the engine: stale entries do no harm
        return
