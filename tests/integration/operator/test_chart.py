"""The chart as helm renders it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import yaml

from tests.integration.operator.conftest import CHART, Operator, rendered_chart
from tests.integration.operator.control_plane import ControlPlane, free_port
from tests.unit.operator.served import SERVED
from tests.waiting import wait_until
from tq_operator.plan.children import desired_children
from tq_operator.plan.queue import Images, queue_from

pytestmark = pytest.mark.timeout(1200)


def dry_run(plane: ControlPlane, manifests: list[dict[str, Any]]) -> str:
    """Have the apiserver accept every one of ``manifests``; what it said on the way, by object where it refuses."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    done = plane.kubectl("apply", "--server-side", "--dry-run=server", "--force-conflicts", "-f", "-", stdin=text)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(manifests), done.stdout
    return done.stderr


def of_kind(manifests: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def test_the_apiserver_accepts_every_manifest(plane: ControlPlane) -> None:
    dry_run(plane, rendered_chart(plane))


@pytest.mark.parametrize("kind", ["MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"])
def test_no_webhook_can_lock_out_kubernetes_or_the_operator_itself(plane: ControlPlane, kind: str) -> None:
    (configuration,) = of_kind(rendered_chart(plane, "--set", "webhook.excludeNamespaces={mine}"), kind)
    for webhook in configuration["webhooks"]:
        rule = webhook["namespaceSelector"]["matchExpressions"][0]
        assert rule["key"] == "kubernetes.io/metadata.name"
        assert rule["operator"] == "NotIn"
        assert rule["values"] == ["kube-system", "kube-public", "kube-node-lease", "tq-system", "mine"]


def test_only_labelled_pods_reach_the_webhook(plane: ControlPlane) -> None:
    (configuration,) = of_kind(rendered_chart(plane), "MutatingWebhookConfiguration")
    labelled, bound = configuration["webhooks"]
    assert labelled["objectSelector"]["matchExpressions"] == [{"key": "transferqueue.io/inject", "operator": "Exists"}]
    assert {"key": "transferqueue.io/bindings", "operator": "Exists"} in bound["namespaceSelector"]["matchExpressions"]


def test_the_webhooks_trust_the_certificate_that_the_operator_serves(plane: ControlPlane) -> None:
    manifests = rendered_chart(plane)
    (secret,) = of_kind(manifests, "Secret")
    (mutating,) = of_kind(manifests, "MutatingWebhookConfiguration")
    assert mutating["webhooks"][0]["clientConfig"]["caBundle"] == secret["data"]["ca.crt"]
    (deployment,) = of_kind(manifests, "Deployment")
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    assert any(volume.get("secret", {}).get("secretName") == secret["metadata"]["name"] for volume in volumes)


def test_a_namespaced_operator_gets_no_rights_in_the_whole_cluster(plane: ControlPlane) -> None:
    manifests = rendered_chart(plane, "--set", "watchNamespaces={a,b}")
    assert of_kind(manifests, "ClusterRole") == []
    namespaces = [role["metadata"]["namespace"] for role in of_kind(manifests, "Role")]
    assert namespaces == ["tq-system", "a", "b"], "its own namespace for the lease and the certificate"


def test_the_definitions_can_be_kept_at_an_uninstall(plane: ControlPlane) -> None:
    definitions = of_kind(rendered_chart(plane), "CustomResourceDefinition")
    assert len(definitions) == 3
    assert all("annotations" not in crd["metadata"] for crd in definitions)
    for crd in of_kind(rendered_chart(plane, "--set", "crds.keep=true"), "CustomResourceDefinition"):
        assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def helm(plane: ControlPlane, *words: str) -> subprocess.CompletedProcess[str]:
    command = [plane.binaries / "helm", "--kubeconfig", plane.kubeconfig, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done


def test_an_upgrade_keeps_the_certificate_and_an_uninstall_leaves_nothing(plane: ControlPlane) -> None:
    # The definitions are there already, and no kubelet makes the operator's pod ready.
    options = ("--namespace", "other-system", "--set", "crds.install=false")
    helm(plane, "install", "other", str(CHART), "--create-namespace", *options)
    first = plane.get("secret", "other-operator-webhook", "other-system")
    assert first
    helm(plane, "upgrade", "other", str(CHART), *options, "--set", "logLevel=DEBUG")
    second = plane.get("secret", "other-operator-webhook", "other-system")
    assert second
    assert second["data"] == first["data"]
    configuration = plane.get("mutatingwebhookconfiguration", "other-operator")
    assert configuration
    assert configuration["webhooks"][0]["clientConfig"]["caBundle"] == first["data"]["ca.crt"]
    helm(plane, "uninstall", "other", "--namespace", "other-system")
    kinds = "clusterroles,clusterrolebindings,mutatingwebhookconfigurations,validatingwebhookconfigurations"
    chosen = ("-l", "app.kubernetes.io/instance=other", "-o", "name")
    assert plane.kubectl("get", kinds, *chosen).stdout == ""
    assert plane.kubectl("get", "all,secrets,serviceaccounts", "-n", "other-system", *chosen).stdout == ""


EXAMPLES = sorted(path.name for path in (CHART / "examples").iterdir())


def test_there_are_examples() -> None:
    assert EXAMPLES == ["dra", "ha-production", "infiniband-shared", "laptop", "roce-sriov", "tcp-cluster"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_values_of_an_example_are_accepted(plane: ControlPlane, name: str) -> None:
    values = str(CHART / "examples" / name / "values.yaml")
    helm(plane, "lint", "--strict", str(CHART), "--values", values)
    assert "Warning" not in dry_run(plane, rendered_chart(plane, "--values", values))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_chart_asks_for_nothing_that_kubernetes_1_29_does_not_serve(plane: ControlPlane, name: str) -> None:
    for manifest in rendered_chart(plane, "--values", str(CHART / "examples" / name / "values.yaml")):
        assert manifest["kind"] in SERVED[manifest["apiVersion"]]


def test_helm_test_finds_the_webhook_answering(operator: Operator) -> None:
    (pod,) = of_kind(rendered_chart(operator.plane), "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    dry_run(operator.plane, [within(restricted(operator.plane), pod)])
    (container,) = pod["spec"]["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    assert given["WEBHOOK"] == "https://tq-operator.tq-system.svc"

    def ran(port: int) -> subprocess.CompletedProcess[str]:
        ours = {"WEBHOOK": f"https://127.0.0.1:{port}", "WEBHOOK_CA": str(operator.plane.authority.files.certificate)}
        assert ours.keys() == given.keys()
        command = [sys.executable, *container["command"][1:]]
        return subprocess.run(command, env=ours, capture_output=True, text=True, timeout=60, check=False)

    assert ran(operator.webhook).stdout == "the webhook answers\n"
    assert ran(free_port()).returncode != 0


def restricted(plane: ControlPlane) -> str:
    name = "restricted"
    plane.kubectl("create", "namespace", name)
    plane.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
    wait_until(lambda: plane.get("serviceaccount", "default", name), "the namespace is set up")
    return name


def within(namespace: str, manifest: dict[str, Any]) -> dict[str, Any]:
    return {**manifest, "metadata": {**manifest["metadata"], "namespace": namespace}}


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    template = workload["spec"]["template"]
    spec = {name: value for name, value in template["spec"].items() if name != "serviceAccountName"}
    metadata = {**template["metadata"], "name": f"pod-of-{workload['metadata']['name']}"}
    # A class that is kept for some namespaces, and is no part of what is tested here.
    spec.pop("priorityClassName", None)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_under_restricted_pod_security(plane: ControlPlane, name: str) -> None:
    namespace, folder = restricted(plane), CHART / "examples" / name
    (operator,) = of_kind(rendered_chart(plane, "--values", str(folder / "values.yaml")), "Deployment")
    text = (folder / "queue.yaml").read_text()
    done = plane.kubectl("apply", "--dry-run=server", "-f", "-", stdin=text)
    assert done.returncode == 0, done.stderr
    document = yaml.safe_load(text)
    document["metadata"] |= {"namespace": namespace, "uid": "11111111-2222"}
    children = desired_children(queue_from(document), Images("server:1", "mooncake:1"))
    # Restricted forbids IPC_LOCK, which RDMA needs: such queues run under a policy of their own.
    workloads = [child for child in children if child["kind"] in {"Deployment", "StatefulSet"}]
    pods = [pod_of(each) for each in (operator, *workloads) if "IPC_LOCK" not in yaml.safe_dump(each)]
    assert pod_of(operator) in pods
    dry_run(plane, [within(namespace, each) for each in (*children, *pods)])


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("replicas=0", "/replicas"),
        ("webhook.failurePolicy=Maybe", "/webhook/failurePolicy"),
        ("webook.port=1", "webook"),
        ("webhook.port=70000", "/webhook/port"),
    ],
)
def test_wrong_values_are_refused_by_name(plane: ControlPlane, option: str, words: str) -> None:
    command = [plane.binaries / "helm", "template", "tq", CHART, "--set", option]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert words in done.stderr
