"""Lives of queues that end or change at an odd moment, and queues with odd names."""

from __future__ import annotations

import time

import pytest

from tests.integration.operator.conftest import Operator
from tests.integration.operator.test_operator import children, condition
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(1200)

DURABLE = """
apiVersion: transferqueue.io/v1alpha1
kind: TransferQueue
metadata: {name: durable, namespace: default}
spec: {backend: {simple: {}}, controller: {durability: DURABILITY, journal: {size: 64Mi}}, storage: {capacity: 64Mi}}
"""


def test_storage_pods_get_other_volumes_though_the_apiserver_lets_no_stateful_set_change_them(
    operator: Operator,
) -> None:
    plane = operator.plane

    def volumes() -> list[str]:
        found = plane.get("statefulset", "durable-storage") or {}
        return [each["metadata"]["name"] for each in found.get("spec", {}).get("volumeClaimTemplates", [])]

    plane.apply(DURABLE.replace("DURABILITY", "none"))
    first = wait_until(lambda: plane.get("statefulset", "durable-storage"), "the storage is made")
    plane.apply(DURABLE.replace("DURABILITY", "node"))
    wait_until(lambda: volumes() == ["arena"], "the pods get volumes of their own")
    assert (plane.get("statefulset", "durable-storage") or {})["metadata"]["uid"] != first["metadata"]["uid"]
    wait_until(lambda: condition(plane, "durable", "Degraded").get("reason") == "AsExpected", "nothing is refused")
    plane.kubectl("delete", "transferqueue", "durable")
    plane.kubectl("delete", "persistentvolumeclaims", "-l", "transferqueue.io/queue=durable", "--wait=false")


SMALL = """
apiVersion: transferqueue.io/v1alpha1
kind: TransferQueue
metadata: {name: NAME, namespace: default}
spec: {backend: {simple: {}}}
"""


def test_a_queue_that_is_deleted_in_the_midst_of_its_creation_leaves_the_next_of_its_name_alone(
    operator: Operator,
) -> None:
    plane, known = operator.plane, len(operator.log.read_text())
    for pause in (0.0, 0.2, 0.4):
        plane.apply(SMALL.replace("NAME", "hasty"))
        time.sleep(pause)  # at any moment of it
        plane.kubectl("delete", "transferqueue", "hasty")
    plane.apply(SMALL.replace("NAME", "hasty"))
    uid = (plane.get("transferqueue", "hasty") or {})["metadata"]["uid"]

    def owned() -> bool:
        found = children(plane, "hasty").values()
        return len(found) == 7 and all(item["metadata"]["ownerReferences"][0]["uid"] == uid for item in found)

    wait_until(owned, "all children belong to the last one", 90)
    wait_until(lambda: condition(plane, "hasty", "Degraded").get("status") == "False", "nothing is wrong", 90)
    assert "Traceback" not in operator.log.read_text()[known:]
    plane.kubectl("delete", "transferqueue", "hasty")


@pytest.mark.parametrize("name", ["a" * 253, "1." + "x-" * 120 + "y"])
def test_a_queue_with_the_longest_of_names_works(operator: Operator, name: str) -> None:
    plane = operator.plane
    plane.apply(SMALL.replace("NAME", f'"{name}"'))
    wait_until(lambda: condition(plane, name, "Ready"), "the queue has a status")
    assert condition(plane, name, "Degraded")["reason"] == "AsExpected"
    pod = {"metadata": {"name": "p", "labels": {"transferqueue.io/inject": "x"}}, "spec": {"containers": []}}
    pod["metadata"]["annotations"] = {"transferqueue.io/inject": name}
    pod["spec"]["containers"] = [{"name": "trainer", "image": "t:1"}]
    made = plane.request(
        "POST", "/api/v1/namespaces/default/pods?dryRun=All", {**pod, "apiVersion": "v1", "kind": "Pod"}
    )
    assert made["metadata"]["annotations"]["transferqueue.io/injected"] == f"default/{name}"
    plane.kubectl("delete", "transferqueue", name)


def test_a_namespace_with_a_queue_can_be_deleted(operator: Operator) -> None:
    plane = operator.plane
    plane.kubectl("create", "namespace", "passing")
    wait_until(lambda: plane.get("serviceaccount", "default", "passing"), "the namespace is set up")
    plane.apply(SMALL.replace("NAME", "q").replace("namespace: default", "namespace: passing"))
    wait_until(lambda: plane.get("statefulset", "q-storage", "passing"), "the storage is made")
    plane.kubectl("delete", "namespace", "passing", "--wait=false")
    wait_until(lambda: plane.get("namespace", "passing") is None, "the namespace is gone", 120)
