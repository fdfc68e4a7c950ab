"""The pod of a node as a process, with only the rights the chart gives it, against a real apiserver."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tests.integration.operator.conftest import environment, rendered_chart
from tests.integration.operator.control_plane import ControlPlane, free_port, process
from tests.unit.fabric.trees import build, facts_of
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(1200)

USER, NODE = "node-reporter", "hgx"


def test_kubectl_get_tqnodes_shows_the_devices_of_a_node(
    plane: ControlPlane, certificates: Path, tmp_path: Path
) -> None:
    for manifest in rendered_chart(plane, "--set", "nodeReports.enabled=true"):
        if not manifest["metadata"]["name"].endswith("-operator-node"):
            continue
        if manifest["kind"] == "ClusterRoleBinding":
            manifest["subjects"] = [{"kind": "User", "name": USER, "apiGroup": "rbac.authorization.k8s.io"}]
        if manifest["kind"] != "DaemonSet":
            plane.apply(yaml.safe_dump(manifest))
    plane.apply(yaml.safe_dump({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}))
    root = tmp_path / "host"
    root.mkdir()
    build(facts_of("hgx-8g-12n-ibstat"), root)
    variables = environment(plane, certificates, free_port(), free_port())
    variables |= {"NODE_NAME": NODE, "TQ_NODE_ROOT": str(root), "TQ_NODE_SECONDS": "0.2"}
    variables["KUBECONFIG"] = str(plane.kubeconfig_for(USER))
    log = tmp_path / "node.log"
    with process([sys.executable, "-m", "tq_operator.runtime.node_report"], log, **variables) as child:

        def row(*words: str) -> str:
            assert child.poll() is None, log.read_text()
            return plane.kubectl("get", "tqnodes", NODE, "--no-headers", *words).stdout

        wait_until(lambda: "8/12" in row(), "the node has its report")
        titles = plane.kubectl("get", "tqnodes").stdout.splitlines()[0].split()
        assert titles == ["NAME", "HCAS", "LINK", "GB/S", "GPUS", "RDMA", "REASON", "AGE"]
        assert row().split()[4:7] == ["8", "True", "UsableDevices"]
        assert "mlx5_1: port 1 is DOWN, not ACTIVE" in row("-o", "wide")
        report = plane.get("tqnode", NODE) or {}
        assert report["status"]["gpus"][0]["distances"]["mlx5_11"] == "SYS"
        next(root.glob("sys/class/infiniband/mlx5_0")).joinpath("ports/1/state").write_text("1: DOWN\n")
        wait_until(lambda: "7/12" in row(), "the report follows the port")
        assert log.read_text().count("HCAs usable") == 2, "written at each change, and not in between"
    plane.kubectl("delete", "node", NODE)
    wait_until(lambda: plane.get("tqnode", NODE) is None, "the report ends with its node", 60)
