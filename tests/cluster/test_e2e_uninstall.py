"""The last of the end-to-end tests: nothing of the product stays on the cluster."""

from __future__ import annotations

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.component import wait_until
from tests.cluster.product import NAMESPACE, RELEASE, SYSTEM, ours

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

KINDS = "pods,deployments,statefulsets,daemonsets,services,configmaps,secrets,serviceaccounts,roles,rolebindings,pvc"
KUBERNETES_OWN = ["configmap/kube-root-ca.crt", "serviceaccount/default"]


def test_delete_and_uninstall_leave_nothing(installed: Cluster) -> None:
    cluster = installed
    cluster.kubectl("delete", "tq,job,pod", "--all", "-n", NAMESPACE, "--timeout=60s")
    cluster.kubectl("delete", "configmap", "jobs", "-n", NAMESPACE)

    def left(namespace: str) -> list[str]:
        return sorted(cluster.kubectl("get", KINDS, "-n", namespace, "-o", "name").split())

    wait_until(lambda: left(NAMESPACE) == KUBERNETES_OWN, "the queues' children are gone", 120)
    cluster.helm("uninstall", RELEASE, "-n", SYSTEM, "--wait", "--timeout=120s")
    wait_until(lambda: not ours(cluster), "nothing of the chart is left", 60)
    wait_until(lambda: left(SYSTEM) == KUBERNETES_OWN, f"{SYSTEM} is empty", 60)
