"""An operator for some namespaces only."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tests.integration.operator.conftest import USER, Operator, environment, rendered_chart
from tests.integration.operator.control_plane import ControlPlane, free_port, process
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(1200)

QUEUE = """
apiVersion: transferqueue.io/v1alpha1
kind: TransferQueue
metadata: {name: only, namespace: own}
spec: {backend: {simple: {}}}
"""


def test_an_operator_of_one_namespace_needs_no_rights_in_the_whole_cluster(
    plane: ControlPlane, certificates: Path, tmp_path: Path
) -> None:
    plane.kubectl("create", "namespace", "own")
    user = "namespaced-operator"
    for manifest in rendered_chart(plane, "--set", "watchNamespaces={own}"):
        if manifest["kind"] == "RoleBinding":
            # Both: the roles in the operators' own namespace are one and the same.
            manifest["subjects"] = [
                {"kind": "User", "name": name, "apiGroup": "rbac.authorization.k8s.io"} for name in (user, USER)
            ]
        if manifest["kind"] in {"Role", "RoleBinding"}:
            plane.apply(yaml.safe_dump(manifest))
    health, log = free_port(), tmp_path / "operator.log"
    variables = environment(plane, certificates, free_port(), health, TQ_WATCH_NAMESPACES="own")
    variables["KUBECONFIG"] = str(plane.kubeconfig_for(user))
    with process([sys.executable, "-m", "tq_operator"], log, **variables) as child:
        running = Operator(plane, child, health, log)
        wait_until(running.ready, "the operator is ready")
        plane.apply(QUEUE)
        wait_until(lambda: plane.get("statefulset", "only-storage", "own"), "the children exist")
        plane.kubectl("delete", "service", "only-storage", "-n", "own")
        wait_until(lambda: plane.get("service", "only-storage", "own"), "the service is back")
        plane.kubectl("delete", "transferqueue", "only", "-n", "own")
    assert "applied StatefulSet own/only-storage" in log.read_text()
    assert "forbidden" not in log.read_text().lower()
