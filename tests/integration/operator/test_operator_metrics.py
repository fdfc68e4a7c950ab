"""The operator's dashboard and alerts against what an operator that works exposes."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.observability.promql import asked_metrics
from tests.integration.operator.conftest import Operator
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(1200)

ENDINGS = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
QUEUE = """
apiVersion: transferqueue.io/v1alpha1
kind: TransferQueue
metadata: {name: measured, namespace: default}
spec: {backend: {simple: {}}}
"""
POD = """
apiVersion: v1
kind: Pod
metadata: {name: measured, namespace: default, labels: {transferqueue.io/inject: measured}}
spec: {containers: [{name: trainer, image: "trainer:1"}]}
"""


def exposed(operator: Operator) -> dict[str, list[tuple[dict[str, str], float]]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{operator.health}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for ending in ENDINGS[family.type]:  # a family with labels has no samples before its first event
            found[family.name + ending] = []
        for sample in family.samples:
            found[sample.name].append((sample.labels, sample.value))
    return found


def test_no_panel_and_no_alert_asks_for_a_metric_that_the_operator_does_not_expose(operator: Operator) -> None:
    operator.plane.apply(QUEUE)
    try:
        wait_until(lambda: operator.plane.get("statefulset", "measured-storage"), "the queue has its children", 60)
        create = ("apply", "--dry-run=server", "-f", "-")
        # Kubernetes makes the namespace's service account in its own time.
        wait_until(lambda: not operator.plane.kubectl(*create, stdin=POD).returncode, "a pod is admitted", 60)
        asked = {(where, name) for where, name in asked_metrics() if name.startswith("tq_operator_")}
        assert len(asked) >= 10
        wait_until(lambda: exposed(operator)["tq_operator_reconcile_seconds_count"], "the queue was looked at", 60)
        found = exposed(operator)
        assert not [(where, name) for where, name in sorted(asked) if name not in found]
        assert found["tq_operator_leader"] == [({}, 1.0)]
        assert {labels["state"] for labels, _ in found["tq_operator_queues"]} == {"known", "ready"}
        assert {labels["settled"] for labels, _ in found["tq_operator_reconcile_seconds_count"]} <= {"yes", "no"}
        assert {"webhook": "inject", "allowed": "yes"} in [
            labels for labels, _ in found["tq_operator_admission_seconds_count"]
        ]
    finally:
        operator.plane.kubectl("delete", "transferqueue", "measured", "--wait=false")
