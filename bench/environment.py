"""The environment of the peers: made once, in the user's cache folder, anew when ``bench/peers.txt`` changes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.protocol import ROOT

VARIABLE = "TQ_BENCH_PEERS_PYTHON"
"""An interpreter that has what ``bench/peers.txt`` lists, instead of the environment made here."""


def peers_python() -> str:
    """The interpreter of the peers; installs it on first use, which downloads packages."""
    if given := os.environ.get(VARIABLE):
        return given
    requirements = ROOT / "bench" / "peers.txt"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    mark = hashlib.sha256(requirements.read_bytes() + version.encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "transferqueue" / "bench"
    folder = cache / f"peers-{mark}"
    python = folder / "bin" / "python"
    if (folder / ".ready").exists():
        return str(python)
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        raise FileNotFoundError(f"uv is missing; run `make setup`, or name an interpreter in {VARIABLE}")
    print(f"installing the peers into {folder} (the first time this downloads them)", file=sys.stderr)
    subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], check=True)
    links = [f"--find-links={path}" for path in os.environ.get("PIP_FIND_LINKS", "").split()]
    command = [uv, "pip", "install", "--python", str(python), *links, "-r", str(requirements)]
    subprocess.run(command, check=True, env={**os.environ, **_settings()})
    (folder / ".ready").touch()
    return str(python)


def _settings() -> dict[str, str]:
    """uv does not read pip's variables; an index or certificate set there counts all the same."""
    names = {"UV_DEFAULT_INDEX": "PIP_INDEX_URL", "SSL_CERT_FILE": "PIP_CERT"}
    return {uv: os.environ[pip] for uv, pip in names.items() if pip in os.environ and uv not in os.environ}
