"""Memory that a storage unit without its own limit may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from transfer_queue.config.processes import StorageUnitConfig

__all__ = ["arena_bytes", "available_memory", "free_memory", "left_of_groups"]

_PAGE = 1 << 20
_UNLIMITED = 1 << 60
"""Version 1 has no word for it, but a very large number."""


class _Files(NamedTuple):
    mount: str
    limit: str
    used: str
    reclaimable: str


_FILES = {
    "": _Files("", "memory.max", "memory.current", "inactive_file"),
    "memory": _Files("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Of control groups version 2 and 1, by their names in /proc/self/cgroup."""


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
    return min(available_memory(), room.f_bavail * room.f_frsize)


def available_memory() -> int:
    """Bytes that this process may take: the least of what the machine and the limits of its control groups leave."""
    return max(0, min([psutil.virtual_memory().available, *left_of_groups()]))


def left_of_groups(root: Path = Path("/")) -> Iterator[int]:
    """Free bytes of each control group of this process that has a limit, innermost first, including reclaimable page
    cache. ``root``: the folder of /proc and /sys."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not on Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        files = _FILES.get("memory" if "memory" in controllers.split(",") else controllers)
        if files is None:
            continue
        top = root / "sys/fs/cgroup" / files.mount
        own = top / path.lstrip("/")
        for group in [own, *own.parents]:
            if top not in (group, *group.parents):
                break
            try:
                limit = (group / files.limit).read_text().strip()
                used = int((group / files.used).read_text())
                kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no such group in this mount, or the root group, which has no limit
                continue
            if limit.isdigit() and int(limit) < _UNLIMITED:
                yield int(limit) - used + int(kept.get(files.reclaimable, 0))
