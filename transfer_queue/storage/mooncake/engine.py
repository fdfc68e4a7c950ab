"""The installed Mooncake engine: whether it loads, the devices it gets, and calls of it that block the program.

To close a connection to a group of masters, the engine waits up to 30 s for its watch of the leader in etcd to expire.
It holds the interpreter meanwhile, so no thread of the program runs. The same happens at the exit of a process that did
not close. `leave` therefore leaves such a connection to the end of the process, and the engine's exit handler does not
run. A client's entries in the metadata store are removed when the interpreter ends. The master gives up the segment of
a storage unit when its process no longer pings, as for a killed process.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import ctypes
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from transfer_queue import fabric
from transfer_queue.errors import StartError

__all__ = [
    "LOWER_BY",
    "MINIMUM_VERSION",
    "check_version",
    "choose_devices",
    "explain_load_error",
    "find_master",
    "import_store",
    "installed_version",
    "leave",
    "quiet",
    "with_low_priority",
]

log = logging.getLogger(__name__)

MINIMUM_VERSION = "0.3.10.post1"
_DISTRIBUTIONS = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
_INSTALL = (
    "pip install 'TransferQueue[mooncake]', or 'TransferQueue[mooncake-cpu]' on a machine without an NVIDIA driver"
)
_DEBIAN_PACKAGES = {
    "libibverbs": "libibverbs1",
    "librdmacm": "librdmacm1",
    "libnuma": "libnuma1",
    "libcurl": "libcurl4",
    "liburing": "liburing2",
    "libstdc++": "libstdc++6",
    "libssl": "libssl3",
    "libcrypto": "libssl3",
}
_LIBRARY = re.compile(r"(?:^|[\s/:])(lib[\w+-]+)\.so((?:\.\d+)*)")
_importing = threading.Lock()
_LOG_LEVEL = "ERROR"
_FATAL = 3


def installed_version() -> str | None:
    """Version of the installed wheel; None if Mooncake is absent or was built from source."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_version(version: str | None) -> None:
    """Raises StartError if ``version`` is older than MINIMUM_VERSION. An unknown version passes."""
    if version is not None and _order(version) < _order(MINIMUM_VERSION):
        raise StartError(
            f"Mooncake {version} is too old, {MINIMUM_VERSION} or newer is needed: "
            f"pip install -U 'mooncake-transfer-engine>={MINIMUM_VERSION}'"
        )


def _order(version: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.post(\d+))?", version)
    return tuple(int(part or 0) for part in match.groups()) if match else (0,)


def explain_load_error(text: str, what: str) -> str | None:
    """One line with the fix for a dynamic loader's message, or None if ``text`` is not one."""
    text = " ".join(text.split())
    if ("GLIBCXX" in text or "CXXABI" in text) and "not found" in text:
        return (
            f"{what} needs a newer C++ runtime: upgrade libstdc++6, or in a conda environment conda install "
            f"'libstdcxx-ng>=13' ({text})"
        )
    if "undefined symbol" in text:
        return (
            f"{what} was built against another version of a library (ABI mismatch): reinstall it with pip install "
            f"--force-reinstall, or rebuild it on this machine ({text})"
        )
    if "GLIBC" in text and "not found" in text:
        return f"{what} does not fit this system's C library: build Mooncake from source ({text})"
    if not any(sign in text for sign in ("cannot open shared object", "file too short", "invalid ELF")):
        return None
    match = _LIBRARY.search(text)
    if match is None:
        return None
    library = f"{match[1]}.so{match[2]}"
    if match[1].startswith(("libcuda", "libcudart", "libnvidia")):
        fix = "install the NVIDIA driver and CUDA runtime, or use the wheel mooncake-transfer-engine-non-cuda"
    elif match[1] in _DEBIAN_PACKAGES:
        fix = f"apt-get install {_DEBIAN_PACKAGES[match[1]]}"
    else:
        fix = f"install the package that has {library}"
    return f"{what} needs {library}, which is missing or damaged: {fix}"


def find_master() -> str:
    """Path of the ``mooncake_master`` binary. Raises StartError if there is none or it is too old."""
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "mooncake_master"
        if path.is_file():
            check_version(installed_version())
            if not os.access(path, os.X_OK):  # some installers drop the mode bits of package data
                path.chmod(path.stat().st_mode | 0o111)
            return str(path)
    found = shutil.which("mooncake_master")
    if found is None:
        raise StartError(f"mooncake_master is not installed: {_INSTALL}")
    return found


def _why_absent() -> str:
    spec = importlib.util.find_spec("mooncake")
    folders = (spec.submodule_search_locations or []) if spec else []
    built = sorted(path.name for folder in folders for path in Path(folder).glob("store*.so"))
    if built:
        return (
            f"Mooncake is installed for another Python than {sys.version_info[0]}.{sys.version_info[1]} "
            f"({', '.join(built)}): install it with the pip of this one, python -m {_INSTALL}"
        )
    return f"Mooncake is not installed: {_INSTALL}"


@contextmanager
def quiet() -> Iterator[None]:
    """No words of the engine's log for the time of a ``with`` block, unless ``MC_LOG_LEVEL`` asks for them.

    While it sets itself up it looks for its own entry in the metadata server, and logs as an error that there is none.
    """
    level = _log_level() if os.environ.get("MC_LOG_LEVEL", _LOG_LEVEL) == _LOG_LEVEL else None
    if level is None:
        yield
        return
    before, level.value = level.value, _FATAL
    try:
        yield
    finally:
        level.value = before


def _log_level() -> ctypes.c_int32 | None:
    """The threshold of the glog that the wheel brings; None if it cannot be found, as in a build of another kind."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "/libglog" in line}
        return ctypes.c_int32.in_dll(ctypes.CDLL(paths.pop()), "_ZN3fLI17FLAGS_minloglevelE")
    except (OSError, KeyError, ValueError):
        return None


def import_store() -> Any:
    """The module ``mooncake.store``. Raises StartError that says how to install what is missing."""
    with _importing:
        check_version(installed_version())
        os.environ.setdefault("MC_LOG_LEVEL", _LOG_LEVEL)  # it tells its whole set-up otherwise
        try:
            return importlib.import_module("mooncake.store")
        except ModuleNotFoundError:
            raise StartError(_why_absent()) from None
        except ImportError as error:
            reason = explain_load_error(str(error), "Mooncake")
            raise StartError(reason or f"Mooncake does not load: {' '.join(str(error).split())}") from error


def choose_devices(
    device_name: str, environment: Mapping[str, str], *, segment_bytes: int, root: str | Path = "/"
) -> fabric.MooncakeSettings:
    """Devices and variables for the engine: those named, or with ``auto`` the nearest to this process's GPUs.

    A process with a segment serves the GPUs of all others, so it opens every rail; one without GPUs opens one rail for
    each NUMA node. TCP is never an answer: a process on TCP and one on RDMA read nothing from each other. Raises
    RdmaUnavailableError with every cause.
    """
    process = {**environment, "MC_MS_AUTO_DISC": "0"}  # as set-up will have it
    resolution = fabric.resolve(
        root,
        process,
        # Names are an order: a wrong one is refused, although the engine could do with the rest.
        policy="auto" if device_name == "auto" else "required",
        device_name=device_name,
        register_nbytes=segment_bytes,
        serves=segment_bytes > 0,
    )
    decision = resolution.decision
    present = [hca.name for hca in resolution.fabric.hcas]
    for name in (part.strip() for part in device_name.split(",")):
        if name not in ("", "auto", *present) and not any(letter in name for letter in "*?["):
            raise fabric.RdmaUnavailableError(
                f"deviceName: no InfiniBand device {name!r} under /sys/class/infiniband; "
                f"present: {', '.join(present) or 'none'}"
            )
    if decision.settings is None:
        raise fabric.RdmaUnavailableError(
            f"protocol rdma cannot be used: {decision.reason.removeprefix('falling back to TCP: ')}; "
            "or set protocol: tcp for the whole queue"
        )
    for warning in decision.warnings:
        log.warning("%s", warning)
    return decision.settings


T = TypeVar("T")

LOWER_BY: Final = 10
"""Nice levels. Where all cores are busy this still gets a tenth of what another thread gets."""


def with_low_priority(call: Callable[[], T]) -> T:
    """Result of ``call``, made on a new thread that has a lower priority than this one.

    Only a privileged thread could raise its priority again, so that a thread is made for each call. It is no longer
    waited for when the process ends, as a stuck engine would keep it for good.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        with suppress(OSError):  # forbidden in a sandbox: as fast as before
            lowered = min(19, os.getpriority(os.PRIO_PROCESS, 0) + LOWER_BY)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), lowered)
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 (boundary: the caller gets it)
            outcome.set_exception(error)

    threading.Thread(target=work, name="tq-mooncake-wait", daemon=True).start()
    return outcome.result()


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
