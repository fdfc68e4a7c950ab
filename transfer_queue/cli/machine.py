"""Facts about this machine for the results of benchmarks. Imports no torch."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transfer_queue.columns.copying import cores

__all__ = ["machine"]


def machine() -> dict[str, Any]:
    """Facts of this machine; ``load`` is the 1-minute load average, others' work included."""
    models = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "load": round(os.getloadavg()[0], 2),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
