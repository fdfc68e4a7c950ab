"""Memory that a storage unit without its own limit may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from transfer_queue.config.processes import StorageUnitConfig

__all__ = ["arena_bytes", "free_memory"]

_CGROUPS = Path("/sys/fs/cgroup")
_PAGE = 1 << 20


def arena_bytes(config: StorageUnitConfig) -> int:
    """Return ``capacity``, or the share ``memory_share`` of the free memory if it is larger and need not be
    reserved."""
    if not config.memory_share or config.reserve:
        return config.capacity
    share = int(free_memory(config.directory) * config.memory_share)
    return max(config.capacity, share // _PAGE * _PAGE)


def free_memory(directory: str) -> int:
    """Bytes that files in ``directory``, a tmpfs, may take: the least of what the machine, the limits of this
    process's control groups and the file system have left."""
    room = os.statvfs(directory)
    return max(0, min(psutil.virtual_memory().available, room.f_bavail * room.f_frsize, *_left_of_groups()))


def _left_of_groups() -> Iterator[int]:
    """Free bytes of each group with a limit, innermost first, including reclaimable page cache."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # not on Linux
        return
    unified = next((line[3:] for line in lines if line.startswith("0::")), None)
    if unified is None:
        return
    own = _CGROUPS / unified.lstrip("/")
    for group in [own, *own.parents]:
        if _CGROUPS not in (group, *group.parents):
            return
        try:
            limit = (group / "memory.max").read_text().strip()
            used = int((group / "memory.current").read_text())
            kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # the root group has no such files
            continue
        if limit != "max":
            yield int(limit) - used + int(kept.get("inactive_file", 0))
