"""Facts of the machine and of the run, for the results."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.protocol import ROOT
from transfer_queue.cli.machine import machine


def facts() -> dict[str, Any]:
    """Those of the machine, the commit, and when this was asked."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        **machine(),
        "commit": commit.stdout.strip() or "unknown",
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def peer_versions(python: str) -> dict[str, str]:
    """Versions of the packages that the peers run."""
    names = ["TransferQueue", "ray", "redis", "pyarrow", "torch", "mooncake-transfer-engine-non-cuda"]
    code = f"from importlib.metadata import version\nprint(*map(version, {names!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=Path(sys.prefix))
    return dict(zip(names, done.stdout.split(), strict=True))
