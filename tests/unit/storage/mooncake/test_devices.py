"""Which RDMA devices a process hands to the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.fabric.trees import PortSpec, Tree
from transfer_queue.fabric import RdmaUnavailableError
from transfer_queue.storage.mooncake.engine import choose_devices

DOWN = PortSpec("1: DOWN")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two GPUs with an HCA beside each, and a third HCA whose port is down."""
    tree = Tree(tmp_path)
    for number in range(2):
        switch = (f"pci0000:{number}0", f"0000:{number}0:01.0", f"0000:{number}1:00.0")
        tree.gpu((*switch, f"0000:{number}1:01.0", f"0000:{number}2:00.0"))
        tree.hca(f"mlx5_{number}", (*switch, f"0000:{number}1:02.0", f"0000:{number}3:00.0"))
    tree.hca("mlx5_2", ("pci0000:20", "0000:20:01.0", "0000:21:00.0"), ports=[DOWN])
    return tmp_path


def test_auto_takes_the_devices_nearest_to_the_gpus_of_the_process(machine: Path) -> None:
    chosen = choose_devices("auto", {"CUDA_VISIBLE_DEVICES": "1"}, segment_bytes=0, root=machine)
    assert chosen.device_name == "mlx5_1"
    assert chosen.environment["MC_MS_AUTO_DISC"] == "0"


def test_a_process_with_a_segment_opens_every_usable_device(machine: Path) -> None:
    chosen = choose_devices("auto", {"CUDA_VISIBLE_DEVICES": "1"}, segment_bytes=1 << 20, root=machine)
    assert chosen.device_name == "mlx5_0,mlx5_1"


def test_named_devices_are_taken_as_they_are(machine: Path) -> None:
    assert choose_devices("mlx5_0", {}, segment_bytes=0, root=machine).device_name == "mlx5_0"


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("mlx5_0,mlx5_9", "no InfiniBand device 'mlx5_9' .* present: mlx5_0, mlx5_1, mlx5_2"),
        ("mlx5_0,mlx5_2", "mlx5_2 is named but"),
    ],
)
def test_a_named_device_that_is_absent_or_down_is_refused(machine: Path, names: str, says: str) -> None:
    with pytest.raises(RdmaUnavailableError, match=says):
        choose_devices(names, {}, segment_bytes=0, root=machine)


def test_a_host_without_devices_is_refused_and_told_of_tcp(tmp_path: Path) -> None:
    with pytest.raises(RdmaUnavailableError, match=r"no InfiniBand device found .* set protocol: tcp for the whole"):
        choose_devices("auto", {}, segment_bytes=0, root=tmp_path)


def test_a_variable_that_forces_tcp_is_refused(machine: Path) -> None:
    with pytest.raises(RdmaUnavailableError, match="MC_FORCE_TCP is set"):
        choose_devices("auto", {"MC_FORCE_TCP": "1"}, segment_bytes=0, root=machine)


def test_a_segment_larger_than_the_memory_that_may_be_locked_is_refused(machine: Path) -> None:
    tree = Tree(machine)
    tree.put("proc/self/limits", "Max locked memory         65536                65536                bytes")
    with pytest.raises(RdmaUnavailableError, match="only 65536 bytes of memory may be locked"):
        choose_devices("auto", {}, segment_bytes=1 << 20, root=machine)
    assert choose_devices("auto", {}, segment_bytes=0, root=machine).devices
