"""When an observed object says what is wanted, and when it has to be written."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.unit.operator.queues import IMAGES, queue
from tq_operator.plan.children import desired_children
from tq_operator.plan.difference import differs, foreign_owner, stamped
from transfer_queue.config.quantity import amount


@pytest.fixture
def wanted() -> dict[str, Any]:
    children = desired_children(queue("{backend: {simple: {}}}"), IMAGES)
    return stamped(next(child for child in children if child["kind"] == "StatefulSet"))


def observed_of(wanted: dict[str, Any]) -> dict[str, Any]:
    """As the apiserver answers: defaults filled in, quantities in another form, fields of other managers."""
    observed = copy.deepcopy(wanted)
    observed["metadata"] |= {"uid": "u", "resourceVersion": "7"}
    observed["metadata"]["annotations"]["someone/else"] = "1"
    spec = observed["spec"]["template"]["spec"]
    spec |= {"restartPolicy": "Always", "dnsPolicy": "ClusterFirst"}
    container = spec["containers"][0]
    container["resources"]["requests"]["cpu"] = "0.1"
    container["resources"]["limits"]["memory"] = "1536Mi"
    container["env"].append({"name": "ADDED_BY_SOMEONE", "value": "1"})
    container["livenessProbe"]["successThreshold"] = 1
    return observed


def test_defaults_other_managers_and_other_forms_of_a_quantity_are_no_difference(wanted: dict[str, Any]) -> None:
    assert not differs(wanted, observed_of(wanted))


def test_an_object_that_is_missing_differs(wanted: dict[str, Any]) -> None:
    assert differs(wanted, None)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replicas"), 5),
        (("spec", "template", "spec", "containers", 0, "image"), "other"),
        (("spec", "template", "spec", "containers", 0, "command"), ["sh"]),
        (("spec", "template", "spec", "containers", 0, "env", 0, "value"), "x"),
        (("spec", "template", "spec", "containers", 0, "resources", "limits", "memory"), "1Gi"),
        (("spec", "template", "spec", "volumes"), []),
        (("spec", "template", "spec", "automountServiceAccountToken"), True),
        (("metadata", "labels"), {}),
        (("metadata", "ownerReferences"), []),
    ],
)
def test_a_change_by_hand_differs(wanted: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    observed = observed_of(wanted)
    inner = observed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert differs(wanted, observed)


def test_a_field_that_is_missing_differs_from_an_empty_one_where_that_is_another_thing(wanted: dict[str, Any]) -> None:
    pod = wanted["spec"]["template"]["spec"]
    pod |= {"automountServiceAccountToken": False, "hostNetwork": False}
    observed = observed_of(wanted)
    del observed["spec"]["template"]["spec"]["hostNetwork"]
    assert not differs(wanted, observed), "the apiserver drops it"
    del observed["spec"]["template"]["spec"]["automountServiceAccountToken"]
    assert differs(wanted, observed)
    everybody = {"metadata": {}, "spec": {"ingress": [{"from": [{"namespaceSelector": {}}]}], "args": {}}}
    assert not differs(everybody, {"metadata": {}, "spec": {"ingress": [{"from": [{"namespaceSelector": {}}]}]}})
    assert differs(everybody, {"metadata": {}, "spec": {"ingress": [{"from": [{}]}]}})


def test_entries_that_share_their_key_are_each_found(wanted: dict[str, Any]) -> None:
    pod = wanted["spec"]["template"]["spec"]
    effects = [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": effect} for effect in ("NoSchedule", "NoExecute")
    ]
    pod["tolerations"] = copy.deepcopy(effects)
    pod["containers"][0]["volumeMounts"] += [
        {"name": "tmp", "mountPath": "/tmp", "subPath": "a"},
        {"name": "tmp", "mountPath": "/var/tmp", "subPath": "b"},
    ]
    observed = observed_of(wanted)
    assert not differs(wanted, observed)
    observed["spec"]["template"]["spec"]["tolerations"][1]["effect"] = "NoSchedule"
    assert differs(wanted, observed)


@pytest.mark.parametrize(("text", "number"), [("1k", 1000), ("2Ki", 2048), ("500m", 0.5), ("1e3", 1000), ("7", 7)])
def test_a_quantity_is_read_in_every_form(text: str, number: float) -> None:
    assert float(amount(text)) == number


@pytest.mark.parametrize("text", ["", "m", "gpu.example.com", "Gi"])
def test_what_is_no_quantity_is_compared_as_text(text: str) -> None:
    assert amount(text) == text


def test_a_field_that_is_no_longer_wanted_differs(wanted: dict[str, Any]) -> None:
    less = copy.deepcopy(wanted)
    del less["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert differs(stamped(less), observed_of(wanted))


def test_an_object_of_the_same_name_without_our_owner_is_foreign(wanted: dict[str, Any]) -> None:
    assert not foreign_owner(wanted, "11111111-2222")
    assert not foreign_owner(None, "11111111-2222")
    assert foreign_owner(wanted, "another")
    del wanted["metadata"]["ownerReferences"]
    del wanted["metadata"]["annotations"]["transferqueue.io/applied"]
    assert foreign_owner(wanted, "11111111-2222")


def test_an_orphan_of_ours_is_taken_back(wanted: dict[str, Any]) -> None:
    orphan = observed_of(wanted)
    orphan["metadata"]["ownerReferences"] = []
    assert not foreign_owner(orphan, "11111111-2222")
    del orphan["metadata"]["annotations"]["transferqueue.io/applied"]
    assert foreign_owner(orphan, "11111111-2222")
