"""What the operator reports about a node."""

from __future__ import annotations

from pathlib import Path

from tests.unit.fabric.trees import PortSpec, Tree, build, facts_of
from tq_operator.fabric import node_status, rdma_condition
from transfer_queue.fabric import resolve


def test_the_report_names_every_hca_with_link_rate_gid_and_reason(tmp_path: Path) -> None:
    build(facts_of("hgx-8g-12n-ibstat"), tmp_path)
    status = node_status(resolve(tmp_path))
    assert status["summary"] == "8 of 12 HCAs usable"
    by_name = {hca["name"]: hca for hca in status["hcas"]}
    assert (by_name["mlx5_0"]["linkLayer"], by_name["mlx5_0"]["rate"]) == ("InfiniBand", "400")
    assert by_name["mlx5_0"]["gid"].startswith("fe80:")
    assert by_name["mlx5_7"]["gid"].startswith("0000:0000:0000:0000:0000:ffff:")
    assert (by_name["mlx5_1"]["state"], by_name["mlx5_1"]["reason"]) == ("DOWN", "port 1 is DOWN, not ACTIVE")
    assert status["gpus"][0]["hcas"] == ["mlx5_0"]
    assert status["gpus"][0]["distances"]["mlx5_11"] == "SYS"


def test_the_condition_tells_rdma_fallback_refusal_and_off_apart(tmp_path: Path) -> None:
    def condition(policy: str) -> tuple[str, str]:
        found = rdma_condition(resolve(tmp_path, policy=policy))  # type: ignore[arg-type]
        return found["status"], found["reason"]

    assert condition("auto") == condition("required") == ("False", "NoDevice")
    tree = Tree(tmp_path)
    tree.hca("mlx5_0", None, ports=[PortSpec("1: DOWN")])
    assert condition("auto") == condition("required") == ("False", "RdmaUnavailable")
    assert "port 1 is DOWN" in rdma_condition(resolve(tmp_path))["message"]
    tree.hca("mlx5_1", None)
    assert condition("auto") == condition("required") == ("True", "UsableDevices")
    assert condition("off") == ("False", "RdmaOff")
