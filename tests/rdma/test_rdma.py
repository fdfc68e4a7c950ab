"""RDMA for real: the fabric code and Mooncake on soft-RoCE devices in a virtual machine; scenario.py runs there."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.cluster.errors import ClusterError
from tests.cluster.host import require_privileges
from tests.rdma.guest import run_in_guest

pytestmark = pytest.mark.timeout(1200)
MTU = 4096


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the scenario reported, by name."""
    try:
        require_privileges()
    except ClusterError as error:
        pytest.skip(str(error))
    log = tmp_path_factory.mktemp("guest") / "console.log"
    return run_in_guest(["PYTHONPATH=.", sys.executable, "-m", "tests.rdma.scenario"], log, timeout_s=1100)


@pytest.mark.parametrize(("case", "devices"), [("all-good", {"mlx5_0", "mlx5_1"}), ("one-named", {"mlx5_1"})])
def test_required_uses_active_devices(results: dict[str, Any], case: str, devices: set[str]) -> None:
    assert results[case]["transport"] == "rdma", results[case]
    assert set(results[case]["devices"]) == devices


def test_a_client_without_gpus_uses_one_device_for_each_numa_node(results: dict[str, Any]) -> None:
    seen = results["all-good-client"]
    assert seen["transport"] == "rdma", seen
    assert len(seen["devices"]) == 1
    assert set(seen["devices"]) < {"mlx5_0", "mlx5_1"}


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("wrong-name", "mlx5_7 is named but not under /sys/class/infiniband"),
        ("one-good-one-wrong", "mlx5_7 is named but not under /sys/class/infiniband"),
        ("one-down-named", "mlx5_2: port 1 is DOWN"),
        ("one-good-one-down", "mlx5_2 is named but unusable (port 1 is DOWN"),
        ("named-with-auto-discovery", "MC_MS_AUTO_DISC=1 makes Mooncake ignore the device names"),
        ("protocol-tcp", "the protocol is set to tcp while RDMA is required"),
        ("bad-gid-index", "has no such GID"),
        ("all-down-required", "port 1 is DOWN"),
        ("no-verbs-required", "no device file /dev/infiniband/uverbs"),
    ],
)
def test_required_refuses_what_mooncake_would_pass_over(results: dict[str, Any], case: str, reason: str) -> None:
    assert results[case]["transport"] == "refused", results[case]
    assert reason in results[case]["reason"]


def test_required_refuses_too_little_locked_memory(results: dict[str, Any]) -> None:
    assert results["little-locked-memory"]["status"] == 1
    assert "only 65536 bytes of memory may be locked" in results["little-locked-memory"]["reason"]


@pytest.mark.parametrize(
    ("case", "reason"),
    [("all-down-auto", "port 1 is DOWN"), ("no-verbs-auto", "no device file /dev/infiniband/uverbs")],
)
def test_auto_falls_back_to_tcp_and_says_so(results: dict[str, Any], case: str, reason: str) -> None:
    assert results[case]["transport"] == "tcp"
    assert results[case]["fallback"]
    assert "falling back to TCP" in results[case]["reason"]
    assert reason in results[case]["reason"]


@pytest.mark.parametrize(("case", "left"), [("one-down-auto", {"mlx5_0", "mlx5_1"}), ("no-uverbs-node", {"mlx5_0"})])
def test_auto_leaves_out_what_cannot_be_used(results: dict[str, Any], case: str, left: set[str]) -> None:
    assert results[case]["transport"] == "rdma", results[case]
    assert set(results[case]["devices"]) == left


@pytest.mark.parametrize("case", ["one-device", "two-devices", "after-link"])
def test_bytes_are_equal_and_go_over_the_devices_alone(results: dict[str, Any], case: str) -> None:
    seen = results[case]
    assert seen["same"]
    once = seen["payload"] / MTU  # packets that carry the dense field in one direction; there is a put and a get
    assert seen["mlx5_0"] + seen["mlx5_1"] >= 2 * once
    assert seen["loopback"] < seen["payload"] / 10  # control messages only


def test_one_device_leaves_the_other_idle(results: dict[str, Any]) -> None:
    assert results["one-device"]["mlx5_1"] == 0


def test_two_devices_share_the_work(results: dict[str, Any]) -> None:
    seen = results["two-devices"]
    assert min(seen["mlx5_0"], seen["mlx5_1"]) >= 0.1 * (seen["mlx5_0"] + seen["mlx5_1"])


def test_a_lost_link_heals_without_a_wrong_byte(results: dict[str, Any]) -> None:
    seen = results["link"]
    assert seen["first"] != "same", "the link was not down"
    assert seen["wrong"] == 0
    assert seen["last"] == "same", seen
