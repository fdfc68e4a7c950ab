"""off, auto and required; one test for each way in which Mooncake does less than it was asked, without an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.fabric.trees import PortSpec, Tree, gids
from transfer_queue.errors import ConfigError
from transfer_queue.fabric import RdmaUnavailableError, mixed_transports, read_fabric, resolve
from transfer_queue.fabric.policy import Decision, LockLimit, decide, read_lock_limit

ROCE = PortSpec(layer="Ethernet")


def machine(root: Path, *ports: PortSpec) -> None:
    """One GPU and one HCA mlx5_<i> per port, all below one host bridge."""
    tree = Tree(root)
    tree.gpu(("pci0000:00", "0000:00:01.0", "0000:01:00.0"))
    for number, port in enumerate(ports):
        tree.hca(
            f"mlx5_{number}", ("pci0000:00", f"0000:00:{number + 2:02x}.0", f"0000:{number + 2:02x}:00.0"), ports=[port]
        )


def both(root: Path, environment: dict[str, str] | None = None, **arguments: str) -> tuple[Decision, Decision]:
    """The decisions under auto and under required."""
    return (
        resolve(root, environment, policy="auto", **arguments).decision,  # type: ignore[arg-type]
        resolve(root, environment, policy="required", **arguments).decision,  # type: ignore[arg-type]
    )


def assert_tcp_or_refused(decisions: tuple[Decision, Decision], words: str) -> None:
    auto, required = decisions
    assert (auto.transport, auto.fallback, auto.settings) == ("tcp", True, None)
    assert auto.reason.startswith("falling back to TCP: ")
    assert words in auto.reason
    assert (required.transport, required.fallback, required.settings) == ("refused", False, None)
    assert words in required.reason
    with pytest.raises(RdmaUnavailableError) as caught:
        required.raise_if_refused()
    assert words in str(caught.value)


def assert_warned_or_refused(decisions: tuple[Decision, Decision], words: str) -> None:
    auto, required = decisions
    assert (auto.transport, auto.fallback) == ("rdma", False)
    assert any(words in warning for warning in auto.warnings)
    assert required.transport == "refused"
    assert words in required.reason


def test_a_good_machine_uses_rdma_under_both_policies_with_names_and_no_discovery(tmp_path: Path) -> None:
    machine(tmp_path, ROCE, ROCE)
    for decision in both(tmp_path):
        assert (decision.transport, decision.fallback, decision.warnings) == ("rdma", False, ())
        assert decision.settings is not None
        assert decision.settings.device_name == "mlx5_0,mlx5_1"
        assert decision.settings.environment == {"MC_ENABLE_DEST_DEVICE_AFFINITY": "1", "MC_MS_AUTO_DISC": "0"}
        decision.raise_if_refused()


def test_off_uses_tcp_and_is_no_fallback(tmp_path: Path) -> None:
    machine(tmp_path, ROCE)
    decision = resolve(tmp_path, policy="off", device_name="mlx5_0").decision
    assert (decision.transport, decision.fallback, decision.settings) == ("tcp", False, None)
    assert decision.warnings == ("protocol tcp ignores the device names mlx5_0",)


def test_no_device_says_where_it_looked_and_what_to_do(tmp_path: Path) -> None:
    machine(tmp_path)
    decisions = both(tmp_path)
    assert_tcp_or_refused(decisions, "no InfiniBand device found under /sys/class/infiniband")
    assert "request the node's RDMA resource" in decisions[1].reason


def test_only_dead_devices(tmp_path: Path) -> None:
    machine(tmp_path, PortSpec("1: DOWN"), PortSpec(gids=[]))
    assert_tcp_or_refused(
        both(tmp_path),
        "none of the 2 RDMA devices is usable (mlx5_0: port 1 is DOWN, not ACTIVE; mlx5_1: port 1 has an empty GID",
    )


def test_a_wrong_name_beside_a_good_one(tmp_path: Path) -> None:
    machine(tmp_path, ROCE)
    decisions = both(tmp_path, device_name="mlx5_0,mlx5_9")
    assert_warned_or_refused(decisions, "mlx5_9 is named but not under /sys/class/infiniband")
    assert decisions[0].settings is not None
    assert decisions[0].settings.device_name == "mlx5_0"


def test_a_dead_device_named_beside_a_good_one(tmp_path: Path) -> None:
    machine(tmp_path, ROCE, PortSpec("1: DOWN", "Ethernet"))
    assert_warned_or_refused(
        both(tmp_path, device_name="mlx5_0,mlx5_1"), "mlx5_1 is named but unusable (port 1 is DOWN, not ACTIVE)"
    )


def test_only_wrong_names(tmp_path: Path) -> None:
    machine(tmp_path, ROCE)
    assert_tcp_or_refused(both(tmp_path, device_name="ib0"), "none of the 1 RDMA devices is usable")


def test_names_with_auto_discovery(tmp_path: Path) -> None:
    machine(tmp_path, ROCE)
    assert_warned_or_refused(both(tmp_path, {"MC_MS_AUTO_DISC": "1"}), "MC_MS_AUTO_DISC=1 makes Mooncake ignore")


@pytest.mark.parametrize("variable", ["MC_USE_TENT", "MC_USE_TEV1"])
def test_the_other_engine_ignores_names(variable: str, tmp_path: Path) -> None:
    machine(tmp_path, ROCE)
    assert_warned_or_refused(both(tmp_path, {variable: "1"}), f"{variable} is set")


def test_forced_tcp(tmp_path: Path) -> None:
    machine(tmp_path, ROCE)
    assert_tcp_or_refused(both(tmp_path, {"MC_FORCE_TCP": "1"}), "MC_FORCE_TCP is set")


def test_protocol_tcp_contradicts_required_and_is_no_fallback_under_auto(tmp_path: Path) -> None:
    machine(tmp_path, ROCE)
    auto, required = both(tmp_path, protocol="tcp")
    assert (auto.transport, auto.fallback) == ("tcp", False)
    assert required.transport == "refused"
    assert "protocol is set to tcp while RDMA is required" in required.reason


@pytest.mark.parametrize("variable", ["MC_GID_INDEX", "NCCL_IB_GID_INDEX"])
def test_a_gid_index_that_is_not_there(variable: str, tmp_path: Path) -> None:
    machine(tmp_path, ROCE)
    assert_tcp_or_refused(both(tmp_path, {variable: "5"}), "is 5, but mlx5_0 has no such GID (it has 0, 1, 2, 3)")
    assert both(tmp_path, {variable: "3"})[1].transport == "rdma"


def test_an_interface_without_ipv4_gets_the_index_of_its_roce_v2_gid(tmp_path: Path) -> None:
    machine(tmp_path, PortSpec(layer="Ethernet", gids=gids("Ethernet", 1, ipv4=False)))
    for decision in both(tmp_path):
        assert decision.settings is not None
        assert decision.settings.environment["MC_GID_INDEX"] == "1"
        assert any("GID 1 is link-local" in warning for warning in decision.warnings)


def test_a_routable_ipv6_gid_is_preferred_to_a_link_local_one(tmp_path: Path) -> None:
    table = [*gids("Ethernet", 1, ipv4=False), ("2001:0db8:0000:0000:0000:0000:0000:0001", "RoCE v2")]
    machine(tmp_path, PortSpec(layer="Ethernet", gids=table))
    decision = both(tmp_path)[1]
    assert decision.settings is not None
    assert decision.settings.environment["MC_GID_INDEX"] == "2"
    assert decision.warnings == ()


def test_a_port_with_only_roce_v1_would_silently_use_gid_0(tmp_path: Path) -> None:
    machine(tmp_path, PortSpec(layer="Ethernet", gids=gids("Ethernet", 1)[:1]))
    assert_warned_or_refused(both(tmp_path), "no GID index holds a RoCE v2 address on all of mlx5_0")


def test_ports_that_need_different_gid_indexes_cannot_share_a_process(tmp_path: Path) -> None:
    v2 = ("2001:0db8:0000:0000:0000:0000:0000:0001", "RoCE v2")
    v1 = ("fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1")
    machine(tmp_path, PortSpec(layer="Ethernet", gids=[v1, v2]), PortSpec(layer="Ethernet", gids=[v2, v1]))
    assert_warned_or_refused(both(tmp_path), "on all of mlx5_0, mlx5_1")


def test_infiniband_needs_no_gid_index(tmp_path: Path) -> None:
    machine(tmp_path, PortSpec())
    decision = both(tmp_path)[1]
    assert decision.settings is not None
    assert "MC_GID_INDEX" not in decision.settings.environment


def test_too_little_lockable_memory(tmp_path: Path) -> None:
    machine(tmp_path, ROCE)
    limits = tmp_path / "proc/self/limits"
    limits.parent.mkdir()
    limits.write_text(
        "Limit        Soft Limit  Hard Limit  Units\nMax locked memory         65536      65536      bytes\n"
    )
    status = tmp_path / "proc/self/status"
    status.write_text("Name:\tx\nCapEff:\t0000000000000000\n")
    assert_tcp_or_refused(both(tmp_path), "only 65536 bytes of memory may be locked")
    status.write_text("Name:\tx\nCapEff:\t0000000000004000\n")
    assert read_lock_limit(tmp_path) == LockLimit(65536, True)
    assert both(tmp_path)[1].transport == "rdma"
    limits.write_text("Max locked memory         unlimited      unlimited      bytes\n")
    assert read_lock_limit(tmp_path) == LockLimit(None, True)


def test_several_causes_are_all_told(tmp_path: Path) -> None:
    machine(tmp_path, ROCE)
    _, required = both(tmp_path, {"MC_FORCE_TCP": "1", "MC_MS_AUTO_DISC": "1"})
    assert "MC_FORCE_TCP" in required.reason
    assert "MC_MS_AUTO_DISC" in required.reason


def test_an_unknown_policy_is_refused_with_the_allowed_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'always', must be one of off, auto, required"):
        decide(read_fabric(tmp_path), "always")  # type: ignore[arg-type]


def test_members_on_different_transports_may_not_mix() -> None:
    assert mixed_transports({"unit-0": "rdma", "trainer-0": "rdma"}) is None
    reason = mixed_transports({"unit-0": "rdma", "trainer-0": "tcp", "unit-1": "rdma"})
    assert reason is not None
    assert "rdma: unit-0, unit-1; tcp: trainer-0" in reason
