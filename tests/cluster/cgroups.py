"""The cluster's control groups: a container for its pods and, above all, the proof that a process is the cluster's.

Every process that the tool starts enters a group below TOP before it runs its program, and everything it
starts in turn stays below TOP. So the kernel, not a file of process ids that a crash leaves stale, says what
belongs to the cluster.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.errors import ClusterError

TOP = "transferqueue-cluster"
GONE_SECONDS = 30.0


@dataclass(frozen=True)
class Hierarchy:
    """A mounted control group file system; `controllers` is empty for version 2, where one mount has all."""

    mount: Path
    controllers: tuple[str, ...]


def hierarchies() -> list[Hierarchy]:
    """The mounted hierarchies of this machine: one for version 2, one a controller (or pair) for version 1."""
    found: dict[Path, Hierarchy] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, options = line.split()[:4]
        if kind == "cgroup2":
            found[Path(mount)] = Hierarchy(Path(mount), ())
        elif kind == "cgroup":
            known = {"cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "hugetlb", "rdma"}
            names = tuple(name for name in options.split(",") if name in known or name.startswith("name="))
            found[Path(mount)] = Hierarchy(Path(mount), names)
    if not found:
        raise ClusterError("no control groups are mounted. Mount cgroup2 on /sys/fs/cgroup, then run again.")
    return list(found.values())


def make_group(path: str) -> None:
    """Make TOP/`path` in every hierarchy, ready for pods to run below it."""
    for hierarchy in hierarchies():
        folder = hierarchy.mount
        for part in (TOP, *path.split("/")):
            if not hierarchy.controllers:
                _delegate(folder)
            parent, folder = folder, folder / part
            folder.mkdir(exist_ok=True)
            if "cpuset" in hierarchy.controllers:
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (folder / name).write_text((parent / name).read_text())


def entrance(name: str) -> Path:
    """The file to write a process id to so that it enters TOP/system/`name`.

    Version 1 processes enter one hierarchy only: which memory or cpu group they count towards is the
    caller's affair.
    """
    every = hierarchies()
    version1 = [each for each in every if each.controllers]
    chosen = next((each for each in version1 if "pids" in each.controllers), (version1 or every)[0])
    folder = chosen.mount / TOP / "system" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "cgroup.procs"


def members(path: str = "") -> set[int]:
    """Ids of the processes in TOP/`path` and below."""
    found: set[int] = set()
    for hierarchy in hierarchies():
        for file in (hierarchy.mount / TOP / path).rglob("cgroup.procs"):
            try:
                found.update(int(line) for line in file.read_text().split())
            except OSError:  # the group went away between listing and reading, or is a threaded one
                continue
    return found - {0}


def kill_members() -> None:
    """Kill every process below TOP and wait until none is left. Raises ClusterError naming those that stay."""
    deadline = time.monotonic() + GONE_SECONDS
    while pids := members():
        for pid in pids:
            _kill_member(pid)
        if time.monotonic() > deadline:
            names = ", ".join(f"{pid} ({_name(pid)})" for pid in sorted(pids))
            raise ClusterError(f"processes do not die: {names}. They wait for the kernel; run down again later.")
        time.sleep(0.05)


def remove_groups() -> None:
    """Remove TOP from every hierarchy."""
    deadline = time.monotonic() + GONE_SECONDS
    for hierarchy in hierarchies():
        top = hierarchy.mount / TOP
        while top.exists():
            try:
                for folder in _deepest_first(top):
                    folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError as error:  # a process that has just died still holds its group for a moment
                if time.monotonic() > deadline:
                    message = f"cannot remove control group {top}: {error.strerror}. Run down again."
                    raise ClusterError(message) from error
                time.sleep(0.05)


def left_groups() -> list[Path]:
    """The folders of TOP that exist."""
    return [each.mount / TOP for each in hierarchies() if (each.mount / TOP).exists()]


def _deepest_first(top: Path) -> Iterator[Path]:
    for folder, _, _ in os.walk(top, topdown=False):
        yield Path(folder)


def _kill_member(pid: int) -> None:
    """Kill `pid` if it is still a member, without a chance to hit another process that got the same id."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if f"/{TOP}/" in Path(f"/proc/{pid}/cgroup").read_text():
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (ProcessLookupError, FileNotFoundError):
        return
    finally:
        os.close(handle)


def _delegate(folder: Path) -> None:
    """Let the children of a version 2 group use every controller it has."""
    controllers = (folder / "cgroup.controllers").read_text().split()
    try:
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))
    except OSError as error:
        raise ClusterError(
            f"control group {folder} does not hand on its controllers ({error.strerror}). "
            "In a container, start it with --privileged --cgroupns=host."
        ) from error


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"
