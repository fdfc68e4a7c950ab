"""Find and remove everything a cluster left on the machine, whatever state it was in.

There is one way down, for a healthy cluster, a half-started one and one whose tool was killed: everything is
found through the kernel (control groups, namespaces, mounts) and ends with SIGKILL, since all data is scratch.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import cgroups
from tests.cluster.commands import run
from tests.cluster.errors import ClusterError
from tests.cluster.paths import STATE_VARIABLE, state_folder

MARKER = ".transferqueue-cluster"


@dataclass(frozen=True)
class Leftovers:
    """What of a cluster is on the machine now."""

    processes: tuple[int, ...]
    groups: tuple[Path, ...]
    mounts: tuple[Path, ...]
    folder: Path | None

    def __bool__(self) -> bool:
        return bool(self.processes or self.groups or self.mounts or self.folder)

    def __str__(self) -> str:
        parts = [f"process {pid}" for pid in self.processes]
        parts += [f"control group {path}" for path in self.groups] + [f"mount {path}" for path in self.mounts]
        return ", ".join(parts + ([f"folder {self.folder}"] if self.folder else [])) or "nothing"


def find_leftovers() -> Leftovers:
    """Look for processes, control groups, mounts and the state folder."""
    state = state_folder()
    processes = cgroups.members() | _namespace_members(state)
    folder = state if state.exists() else None
    return Leftovers(tuple(sorted(processes)), tuple(cgroups.left_groups()), tuple(_mounts_below(state)), folder)


def make_state_folder() -> None:
    """Make the state folder, marked as ours to delete.

    Raises ClusterError for a folder that holds something else.
    """
    state = state_folder()
    state.mkdir(parents=True, exist_ok=True)
    _require_ours(state)
    state.chmod(0o711)
    (state / MARKER).touch()


def remove_leftovers() -> None:
    """Remove all that `find_leftovers` finds. Raises ClusterError naming what cannot be removed."""
    state = state_folder()
    if state.exists():
        _require_ours(state)
    _require_same_folder(state)
    cgroups.kill_members()
    for pid in _namespace_members(state):
        _kill(pid)
    for mount in _mounts_below(state):
        _unmount(mount)
    cgroups.remove_groups()
    if state.exists():  # hundreds of thousands of files, which is slow one by one from here
        remove = ["rm", "--recursive", "--force", "--one-file-system"]
        run([*remove, *(path for path in state.iterdir() if path.name != MARKER)])
        run([*remove, state])  # the mark goes last: a removal that is killed can be repeated


def _require_ours(state: Path) -> None:
    if not (state / MARKER).exists() and any(state.iterdir()):
        raise ClusterError(f"{state} holds files that are not a cluster's. Set {STATE_VARIABLE} to another folder.")


def _require_same_folder(state: Path) -> None:
    """Refuse to pull a cluster from under another state folder: its mounts and files would stay."""
    wanted = f"{STATE_VARIABLE}=".encode()
    for pid in cgroups.members("system"):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        other = next((each[len(wanted) :].decode() for each in variables if each.startswith(wanted)), str(state))
        if other != str(state):
            raise ClusterError(f"the cluster that runs here has its state in {other}. Set {STATE_VARIABLE}={other}.")


def _namespace_members(state: Path) -> set[int]:
    """Processes in the cluster's network namespaces; this process and its ancestors are spared."""
    namespaces = set()
    for file in (state / "netns").glob("*"):
        found = file.stat()
        namespaces.add((found.st_dev, found.st_ino))
    spared = _ancestry()
    members = set()
    for entry in Path("/proc").iterdir():
        if namespaces and entry.name.isdigit() and int(entry.name) not in spared:
            try:
                found = (entry / "ns" / "net").stat()
            except OSError:
                continue
            if (found.st_dev, found.st_ino) in namespaces:
                members.add(int(entry.name))
    return members


def _ancestry() -> set[int]:
    found, pid = set(), os.getpid()
    while pid:
        found.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    deadline = time.monotonic() + cgroups.GONE_SECONDS
    while Path(f"/proc/{pid}/exe").exists():
        if time.monotonic() > deadline:
            raise ClusterError(f"process {pid} in the cluster's network does not die. Run down again later.")
        time.sleep(0.02)


def _mounts_below(folder: Path) -> list[Path]:
    """Mount points at or below `folder` in this mount namespace, the last mounted first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        path = Path(line.split()[4].encode().decode("unicode_escape"))  # spaces stand as \040
        if path == folder or folder in path.parents:
            found.append(path)
    return found[::-1]


def _unmount(mount: Path) -> None:
    try:
        run(["umount", mount])
    except ClusterError:  # busy: detach it now, the kernel frees it with its last user
        run(["umount", "--lazy", mount])
