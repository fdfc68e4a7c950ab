"""The installed Mooncake: where it is, whether it is new enough, why it does not load."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transfer_queue.errors import StartError

__all__ = [
    "MINIMUM_VERSION",
    "check_version",
    "explain_load_error",
    "find_master",
    "import_store",
    "installed_version",
    "quiet",
]

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
