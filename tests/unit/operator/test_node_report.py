"""The status of a TQNode, from the recorded fabrics of real machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.fabric.trees import DATA, Tree, build, facts_of
from tq_operator.runtime.node_report import report_of

NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"


@pytest.mark.parametrize("machine", sorted(path.stem for path in DATA.glob("*.json")))
def test_every_device_of_a_recorded_machine_is_in_its_report(machine: str, tmp_path: Path) -> None:
    facts = facts_of(machine)
    build(facts, tmp_path)
    report = report_of(tmp_path, {}, NOW)
    usable = [hca for hca in report["hcas"] if hca["usable"]]
    assert report["usable"] == f"{len(usable)}/{len(report['hcas'])}"
    assert report["gpuCount"] == len(report["gpus"])
    for hca in report["hcas"]:
        assert hca["usable"] or f"{hca['name']}: {hca['reason']}" in report["unusable"]
    for gpu in report["gpus"]:
        assert set(gpu["distances"]) == {hca["name"] for hca in report["hcas"]}
        assert set(gpu["hcas"]) <= {hca["name"] for hca in usable}
    assert report_of(tmp_path, report, LATER) == report, "a second look changes nothing"


def test_a_port_that_goes_down_changes_the_report_and_the_time_of_its_condition(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.hca("mlx5_0", None)
    first = report_of(tmp_path, {}, NOW)
    assert (first["usable"], first["links"], first["rates"]) == ("1/1", "InfiniBand", "200")
    state = next(tmp_path.rglob("ports/1/state"))
    state.write_text("1: DOWN\n")
    second = report_of(tmp_path, first, LATER)
    assert (second["usable"], second["links"]) == ("0/1", "")
    assert second["unusable"] == "mlx5_0: port 1 is DOWN, not ACTIVE"
    (condition,) = second["conditions"]
    assert (condition["status"], condition["lastTransitionTime"]) == ("False", LATER)


def test_a_machine_without_rdma_has_a_report_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    report = report_of(tmp_path, {}, NOW)
    assert report["usable"] == "0/0"
    assert report["conditions"][0]["reason"] == "NoDevice"
