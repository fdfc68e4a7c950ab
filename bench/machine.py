"""Facts of the machine and of the run, for the results."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.protocol import ROOT
from transfer_queue.columns.copying import cores


def facts() -> dict[str, Any]:
    """``load`` is the 1-minute load average at the start: others' work on this machine."""
    models = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": cores(),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": commit.stdout.strip() or "unknown",
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load": round(os.getloadavg()[0], 2),
    }


def peer_versions(python: str) -> dict[str, str]:
    """Versions of the packages that the peers run."""
    names = ["TransferQueue", "ray", "redis", "pyarrow", "torch", "mooncake-transfer-engine-non-cuda"]
    code = f"from importlib.metadata import version\nprint(*map(version, {names!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=Path(sys.prefix))
    return dict(zip(names, done.stdout.split(), strict=True))
