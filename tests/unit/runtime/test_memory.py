"""The limits of control groups, in trees of files as Linux shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from transfer_queue.runtime.memory import left_of_groups

NAMES = {
    2: ("0::/kubepods/pod1\n", "", "memory.max", "memory.current", "inactive_file"),
    1: (
        "5:devices:/\n4:cpu,memory:/kubepods/pod1\n0::/\n",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


def tree(root: Path, version: int, groups: dict[str, tuple[str, int, int]]) -> None:
    """``groups``: (limit, used, reclaimable) by path."""
    own, mount, limit_file, used_file, reclaimable_file = NAMES[version]
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    for path, (limit, used, reclaimable) in groups.items():
        group = root / "sys/fs/cgroup" / mount / path
        group.mkdir(parents=True, exist_ok=True)
        (group / limit_file).write_text(f"{limit}\n")
        (group / used_file).write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 5\n{reclaimable_file} {reclaimable}\n")


@pytest.mark.parametrize(("version", "unlimited"), [(1, str((1 << 63) - 4096)), (2, "max")])
def test_each_group_with_a_limit_counts(tmp_path: Path, version: int, unlimited: str) -> None:
    tree(tmp_path, version, {"kubepods/pod1": (unlimited, 10, 0), "kubepods": ("1000", 300, 50)})
    assert list(left_of_groups(tmp_path)) == [750]


@pytest.mark.parametrize("version", [1, 2])
def test_in_a_container_the_own_group_is_the_root_of_the_mount(tmp_path: Path, version: int) -> None:
    tree(tmp_path, version, {"": ("1000", 600, 100)})
    assert list(left_of_groups(tmp_path)) == [500]


def test_without_control_groups_nothing_is_known(tmp_path: Path) -> None:
    assert list(left_of_groups(tmp_path)) == []
