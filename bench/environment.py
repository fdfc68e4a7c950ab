"""The environment of the peers: made once, in the user's cache folder, and again when ``bench/peers.txt`` changes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from bench.protocol import ROOT

VARIABLE = "TQ_BENCH_PEERS_PYTHON"
"""An interpreter that has what ``bench/peers.txt`` lists, instead of the environment made here."""
REQUIREMENTS = ROOT / "bench" / "peers.txt"
PAUSES_S = (5.0, 20.0)
"""Between the attempts to install; uv itself tries each download more than once."""


class PeersNotInstalled(RuntimeError):
    """The peers could not be installed, and what to do."""


def peers_python() -> str:
    """The interpreter of the peers; installs it on first use, which downloads packages. Raises PeersNotInstalled."""
    if given := os.environ.get(VARIABLE):
        return given
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    mark = hashlib.sha256(REQUIREMENTS.read_bytes() + version.encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "transferqueue" / "bench"
    folder = cache / f"peers-{mark}"
    python = folder / "bin" / "python"
    if (folder / ".ready").exists() and python.exists():
        return str(python)
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        raise PeersNotInstalled(f"uv is missing; run `make setup`, or name an interpreter in {VARIABLE}")
    print(f"installing the peers into {folder} (the first time this downloads them)", file=sys.stderr)
    install(uv, folder)
    return str(python)


def install(uv: str, folder: Path, pauses_s: tuple[float, ...] = PAUSES_S) -> None:
    """Make ``folder`` the environment of the peers, tried once more after each pause. Raises PeersNotInstalled."""
    links = [f"--find-links={path}" for path in os.environ.get("PIP_FIND_LINKS", "").split()]
    commands = [
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)],
        [uv, "pip", "install", "--python", str(folder / "bin" / "python"), *links, "-r", str(REQUIREMENTS)],
    ]
    environ = {**os.environ, **_settings()}
    for pause in (*pauses_s, None):
        if all(subprocess.run(command, check=False, env=environ).returncode == 0 for command in commands):
            (folder / ".ready").touch()
            return
        if pause is not None:
            print(f"the peers could not be installed; once more in {pause:g} s", file=sys.stderr)
            time.sleep(pause)
    index = environ.get("UV_DEFAULT_INDEX", "PyPI")
    raise PeersNotInstalled(
        f"the peers of the benchmark could not be installed in {len(pauses_s) + 1} attempts: uv's messages above say "
        f"why. They come from {index} (UV_DEFAULT_INDEX, PIP_INDEX_URL); without a network, name in {VARIABLE} an "
        f"interpreter that has what bench/peers.txt lists."
    )


def _settings() -> dict[str, str]:
    """uv does not read pip's variables; an index or certificate set there counts all the same."""
    names = {"UV_DEFAULT_INDEX": "PIP_INDEX_URL", "SSL_CERT_FILE": "PIP_CERT"}
    return {uv: os.environ[pip] for uv, pip in names.items() if pip in os.environ and uv not in os.environ}
