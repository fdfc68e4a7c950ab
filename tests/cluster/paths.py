"""Where the tool keeps things: a cache that outlives clusters and a state folder that dies with each."""

from __future__ import annotations

import os
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
REPOSITORY = SOURCE.parent.parent
STATE_VARIABLE = "TQ_CLUSTER_DIR"


def cache_folder() -> Path:
    """Folder of built binaries, base images and wheels; safe to delete, expensive to refill."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "transferqueue" / "cluster"


def state_folder() -> Path:
    """Folder of the running cluster: keys, etcd, logs, container layers. Exists only while a cluster does."""
    return Path(os.environ.get(STATE_VARIABLE) or "/var/lib/transferqueue-cluster").absolute()
