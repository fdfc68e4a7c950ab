"""What others added to an object of ours is found by its owner, and taken out alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.operator.queues import IMAGES, queue
from tq_operator.plan.children import desired_children
from tq_operator.plan.difference import stamped
from tq_operator.plan.drift import IGNORE_DRIFT_ANNOTATION, drift, repair
from tq_operator.plan.step import next_step, wanted_children

POD = ("spec", "template", "spec")


def child(kind: str) -> dict[str, Any]:
    children = desired_children(queue("{backend: {simple: {}}, security: {networkPolicy: true}}"), IMAGES)
    return stamped(next(child for child in children if child["kind"] == kind))


def changed(wanted: dict[str, Any], fields: dict[str, Any], **owner: str) -> dict[str, Any]:
    """``wanted`` as the apiserver has it, with ``fieldsV1`` of somebody else."""
    observed = copy.deepcopy(wanted)
    observed["metadata"] |= {
        "resourceVersion": "7",
        "managedFields": [
            {"manager": "transferqueue-operator", "operation": "Apply", "fieldsV1": {"f:spec": {"f:replicas": {}}}},
            {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": fields, **owner},
        ],
    }
    return observed


def nested(path: tuple[str, ...], inner: dict[str, Any]) -> dict[str, Any]:
    for name in reversed(path):
        inner = {f"f:{name}": inner}
    return inner


def patched(wanted: dict[str, Any], observed: dict[str, Any]) -> dict[str, Any]:
    test, *operations = repair(wanted, observed)
    assert test == {"op": "test", "path": "/metadata/resourceVersion", "value": "7"}
    return {operation["path"]: operation.get("value") for operation in operations}


def test_a_service_account_goes_with_its_older_name_from_which_the_apiserver_would_restore_it() -> None:
    wanted = child("Deployment")
    observed = changed(wanted, nested(POD, {"f:serviceAccountName": {}}))
    observed["spec"]["template"]["spec"] |= {"serviceAccountName": "other", "serviceAccount": "other"}
    assert drift(wanted, observed) == ["spec.template.spec.serviceAccountName"]
    left = patched(wanted, observed)["/spec"]["template"]["spec"]
    assert not {"serviceAccountName", "serviceAccount"} & left.keys()


def test_a_variable_and_the_network_of_the_host_are_taken_out_of_a_template_and_defaults_stay() -> None:
    wanted = child("StatefulSet")
    container = 'k:{"name":"storage"}'
    fields = {
        "f:hostNetwork": {},
        "f:containers": {
            container: {".": {}, "f:env": {'k:{"name":"FOREIGN"}': {".": {}, "f:name": {}, "f:value": {}}}}
        },
    }
    observed = changed(wanted, nested(POD, fields))
    pod = observed["spec"]["template"]["spec"]
    pod["dnsPolicy"] = "ClusterFirst"
    before = copy.deepcopy(observed)
    pod["hostNetwork"] = True
    pod["containers"][0]["env"].insert(0, {"name": "FOREIGN", "value": "1"})
    assert drift(wanted, observed) == [
        "spec.template.spec.containers.storage.env.FOREIGN",
        "spec.template.spec.hostNetwork",
    ]
    after = patched(wanted, observed)
    assert after["/spec"] == before["spec"]
    assert [entry["manager"] for entry in after["/metadata/managedFields"]] == ["transferqueue-operator"]


def test_a_port_under_another_number_is_replaced_in_one_patch() -> None:
    wanted = child("Service")
    observed = changed(wanted, nested(("spec", "ports"), {'k:{"port":1234,"protocol":"TCP"}': {".": {}, "f:port": {}}}))
    observed["spec"]["ports"][0]["port"] = 1234
    assert drift(wanted, observed) == ["spec.ports.1234/TCP"]
    assert patched(wanted, observed)["/spec"]["ports"] == wanted["spec"]["ports"]


def test_a_port_under_another_name_is_no_second_port_with_its_number() -> None:
    """Somebody applied the Service as it is, with one name changed, and so owns its defaults too."""
    wanted = child("Service")
    observed = changed(wanted, nested(("spec", "sessionAffinity"), {}))
    observed["spec"]["ports"][0]["name"] += "x"
    observed["spec"]["sessionAffinity"] = "None"
    assert patched(wanted, observed)["/spec"]["ports"] == wanted["spec"]["ports"]


@pytest.mark.parametrize(
    "add",
    [
        lambda rules: rules.append({}),
        lambda rules: rules[0]["from"].append({"ipBlock": {"cidr": "0.0.0.0/0"}}),
        lambda rules: rules[1]["ports"][0].update(endPort=65535),
    ],
)
def test_what_others_admit_in_a_rule_of_a_network_policy_is_drift(add: Callable[[Any], None]) -> None:
    wanted = child("NetworkPolicy")
    observed = changed(wanted, nested(("spec", "ingress"), {}))
    assert drift(wanted, observed) == []
    add(observed["spec"]["ingress"])
    assert drift(wanted, observed) == ["spec.ingress"]
    assert patched(wanted, observed)["/spec"] == wanted["spec"]


@pytest.mark.parametrize(
    ("fields", "owner", "found"),
    [
        (nested(("spec", "selector"), {}), {}, ["spec.selector"]),
        (nested(("spec", "selector"), {}), {"subresource": "status"}, []),
        (nested(("spec", "selector"), {}), {"manager": "before-first-apply"}, []),
        (nested(("spec", "clusterIP"), {}), {}, []),
        (nested(("metadata", "labels", "foreign"), {}), {}, []),
    ],
)
def test_a_key_that_others_added_is_drift_and_what_the_cluster_allocates_is_none(
    fields: dict[str, Any], owner: dict[str, str], found: list[str]
) -> None:
    wanted = child("Service")
    observed = changed(wanted, fields, **owner)
    observed["spec"] |= {"clusterIP": "10.0.0.1", "selector": {**wanted["spec"]["selector"], "foreign": "yes"}}
    observed["metadata"]["labels"]["foreign"] = "yes"
    assert drift(wanted, observed) == found


@pytest.mark.parametrize("path", ["spec.template.spec.hostNetwork", "spec.template.spec", "spec.paused, spec.template"])
def test_an_annotation_allows_a_field_or_all_below_it(path: str) -> None:
    wanted = child("Deployment")
    observed = changed(wanted, nested((*POD, "hostNetwork"), {}))
    observed["spec"]["template"]["spec"]["hostNetwork"] = True
    assert drift(wanted, observed)
    observed["metadata"]["annotations"][IGNORE_DRIFT_ANNOTATION] = path
    assert drift(wanted, observed) == []


def test_a_restart_by_kubectl_is_no_drift() -> None:
    wanted = child("Deployment")
    mark = "kubectl.kubernetes.io/restartedAt"
    observed = changed(wanted, nested(("spec", "template", "metadata", "annotations", mark), {}))
    observed["spec"]["template"]["metadata"]["annotations"][mark] = "now"
    assert drift(wanted, observed) == []


@pytest.mark.parametrize(
    ("ready", "holds_rows", "held"),
    [(0, True, False), (1, True, True), (1, False, False)],
)
def test_a_template_is_set_back_at_once_until_all_pods_with_rows_are_of_the_changed_one(
    ready: int, holds_rows: bool, held: bool
) -> None:
    made = queue("{backend: {simple: {}}}")
    children = {(child["kind"], child["metadata"]["name"]): child for child in wanted_children(made, IMAGES)}
    key = ("Deployment", "quickstart-controller")
    observed = changed(children[key], nested((*POD, "hostNetwork"), {}))
    observed["spec"]["template"]["spec"]["hostNetwork"] = True
    observed["metadata"]["generation"] = 2
    observed["status"] = {"observedGeneration": 2, "readyReplicas": ready, "updatedReplicas": ready}
    step = next_step(made, IMAGES, {**children, key: observed}, holds_rows)
    assert [child["metadata"]["name"] for child in step.apply] == ([] if held else ["quickstart-controller"])
    assert ("restarts quickstart-controller" in step.held) is held
