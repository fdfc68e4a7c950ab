"""``spec.podTemplate``: laid over every pod of a queue."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.operator.queues import queue
from tq_operator.plan.children import desired_children
from tq_operator.plan.queue import Images, queue_from
from transfer_queue.config.resource import parse
from transfer_queue.errors import ConfigError

TEMPLATE: dict[str, Any] = {
    "metadata": {
        "labels": {"kueue.x-k8s.io/queue-name": "gpus", "transferqueue.io/queue": "forged"},
        "annotations": {"sidecar.istio.io/inject": "false"},
    },
    "spec": {
        "priorityClassName": "high",
        "runtimeClassName": "kata",
        "imagePullSecrets": [{"name": "pull"}],
        "hostNetwork": True,
        "securityContext": {"runAsUser": 1000, "fsGroup": None},
        "tolerations": [{"operator": "Exists"}],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "more", "emptyDir": {}}],
        "containers": [
            {"name": "*", "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}}},
            {
                "name": "storage",
                "env": [{"name": "A", "value": "1"}],
                "volumeMounts": [{"mountPath": "/m", "name": "more"}],
            },
            {"name": "proxy", "image": "proxy:1"},
        ],
    },
}


def document(template: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "transferqueue.io/v1alpha1",
        "kind": "TransferQueue",
        "metadata": {"name": "q", "namespace": "rl", "uid": "u"},
        "spec": {"backend": {"mooncake": {"protocol": "tcp"}}, "podTemplate": template},
    }


def templates(template: dict[str, Any], images: Images) -> dict[str, dict[str, Any]]:
    children = desired_children(queue_from(document(template)), images)
    return {child["metadata"]["name"]: found for child in children if (found := child.get("spec", {}).get("template"))}


def test_every_pod_of_a_queue_has_what_the_template_says_and_keeps_what_it_is_found_by() -> None:
    plain, made = (templates(each, Images("s", "m")) for each in ({}, TEMPLATE))
    assert len(made) == 3
    for name, template in made.items():
        metadata, spec, own = template["metadata"], template["spec"], plain[name]["spec"]
        assert metadata["labels"] == {"kueue.x-k8s.io/queue-name": "gpus", **plain[name]["metadata"]["labels"]}
        assert metadata["annotations"]["sidecar.istio.io/inject"] == "false"
        assert (spec["priorityClassName"], spec["runtimeClassName"]) == ("high", "kata")
        assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"
        assert spec["securityContext"]["runAsUser"] == 1000
        assert "fsGroup" not in spec["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        first, *others = spec["containers"]
        assert first["command"] == own["containers"][0]["command"]
        assert first["securityContext"] == {
            **own["containers"][0]["securityContext"],
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert [each["name"] for each in others] == ["proxy"], "an entry without an image adds no container"
        assert [each["name"] for each in spec["volumes"]][-1] == "more"
        assert {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}} in spec["volumes"]
        assert ({"name": "A", "value": "1"} in first["env"]) == (first["name"] == "storage")


def test_the_platform_can_choose_the_user() -> None:
    for template in templates({}, Images("s", "m", fixed_user=False)).values():
        assert template["spec"]["securityContext"].keys() == {"runAsNonRoot", "seccompProfile"}


def test_a_misspelt_field_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"spec\.podTemplate\.spec\.priorityClass.*priorityClassName"):
        parse(document({"spec": {"priorityClass": "high"}}))


def test_an_unready_pod_does_not_keep_its_node_from_being_drained() -> None:
    budgets = [
        each
        for each in desired_children(queue("{backend: {simple: {}}}"), Images("s", "m"))
        if each["kind"] == "PodDisruptionBudget"
    ]
    assert budgets
    assert all(each["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for each in budgets)
