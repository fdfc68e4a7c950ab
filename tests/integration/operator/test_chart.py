"""The chart as helm renders it."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.pki import Authority
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


def test_a_rendering_without_a_cluster_is_the_same_each_time_and_has_no_key(plane: ControlPlane) -> None:
    manifests = rendered_chart(plane)
    assert rendered_chart(plane) == manifests
    assert of_kind(manifests, "Secret") == []
    assert "caBundle" not in json.dumps(manifests)


@pytest.mark.parametrize("value", ["existingSecret=mine", "issuerRef.name=corporate"])
def test_the_certificate_can_be_somebody_elses(plane: ControlPlane, value: str) -> None:
    manifests = rendered_chart(plane, "--set", f"webhook.certificate.{value},webhook.certificate.caBundle=PEM")
    (deployment,) = of_kind(manifests, "Deployment")
    given = {
        entry["name"]: entry.get("value") for entry in deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert given["TQ_WEBHOOK_CERTIFICATE"] == "given"
    assert given["TQ_WEBHOOK_BUNDLES"] == "false"
    if certificates := of_kind(manifests, "Certificate"):
        assert certificates[0]["spec"]["secretName"] == given["TQ_WEBHOOK_SECRET"]
        assert "tq-operator.tq-system.svc" in certificates[0]["spec"]["dnsNames"]
    else:
        assert given["TQ_WEBHOOK_SECRET"] == "mine"
    (mutating,) = of_kind(manifests, "MutatingWebhookConfiguration")
    assert mutating["webhooks"][0]["clientConfig"]["caBundle"] == base64.b64encode(b"PEM").decode()
    assert not [role for role in of_kind(manifests, "ClusterRole") if role["metadata"]["name"].endswith("bundles")]


def test_a_namespaced_operator_gets_no_rights_in_the_whole_cluster(plane: ControlPlane) -> None:
    manifests = rendered_chart(plane, "--set", "watchNamespaces={a,b}")
    (bundles,) = of_kind(manifests, "ClusterRole")
    assert [rule["resourceNames"] for rule in bundles["rules"]] == [["tq-operator"]], "its own configurations alone"
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


def test_upgrades_and_rollbacks_keep_whom_the_apiserver_trusts_and_an_uninstall_leaves_nothing(
    plane: ControlPlane, tmp_path: Path
) -> None:
    # The definitions are there already, and no kubelet makes the operator's pod ready.
    options = ("--namespace", "other-system", "--set", "crds.install=false")
    helm(plane, "install", "other", str(CHART), "--create-namespace", *options)

    def trusted() -> list[str]:
        configuration = plane.get("mutatingwebhookconfiguration", "other-operator") or {}
        return [hook["clientConfig"].get("caBundle", "") for hook in configuration["webhooks"]]

    assert trusted() == ["", ""]

    def trust(certificate: Path) -> str:  # as the operator does
        authority = base64.b64encode(certificate.read_bytes()).decode()
        for number in range(2):
            change = [{"op": "add", "path": f"/webhooks/{number}/clientConfig/caBundle", "value": authority}]
            words = ("patch", "mutatingwebhookconfiguration", "other-operator", "--type=json", "-p", json.dumps(change))
            assert plane.kubectl(*words).returncode == 0
        return authority

    authority = trust(plane.authority.files.certificate)
    for level in ("DEBUG", "INFO"):
        helm(plane, "upgrade", "other", str(CHART), *options, "--set", f"logLevel={level}")
        assert trusted() == [authority, authority]
    replaced = trust(Authority(tmp_path).files.certificate)
    helm(plane, "rollback", "other", "2", "--namespace", "other-system")
    assert trusted() == [replaced, replaced]
    helm(plane, "uninstall", "other", "--namespace", "other-system")
    kinds = "clusterroles,clusterrolebindings,mutatingwebhookconfigurations,validatingwebhookconfigurations"
    chosen = ("-l", "app.kubernetes.io/instance=other", "-o", "name")
    assert plane.kubectl("get", kinds, *chosen).stdout == ""
    assert plane.kubectl("get", "all,secrets,serviceaccounts", "-n", "other-system", *chosen).stdout == ""


PODS = """
openshift: true
podTemplate:
  metadata: {labels: {team: rl, app.kubernetes.io/name: forged}, annotations: {sidecar.istio.io/inject: "false"}}
  spec:
    hostNetwork: true
    priorityClassName: system-cluster-critical
    securityContext: {supplementalGroups: [7]}
    containers:
      - {name: "*", env: [{name: X, value: "1"}]}
      - {name: proxy, image: "proxy:1"}
      - {name: storage, resources: {}}
"""


def test_all_pods_of_the_chart_have_what_the_values_say(plane: ControlPlane, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(PODS)
    options = ("--values", str(tmp_path / "values.yaml"), "--set", "nodeReports.enabled=true,healthPort=18081")
    manifests = rendered_chart(plane, *options)
    dry_run(plane, manifests)
    (deployment,), (daemons,) = of_kind(manifests, "Deployment"), of_kind(manifests, "DaemonSet")
    for pod in (*of_kind(manifests, "Pod"), *(each["spec"]["template"] for each in (deployment, daemons))):
        labels, spec = pod["metadata"]["labels"], pod["spec"]
        assert labels["team"] == "rl"
        assert labels["app.kubernetes.io/name"].startswith("transferqueue-")
        assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"
        assert spec["priorityClassName"] == "system-cluster-critical"
        assert spec["securityContext"].keys() == {"runAsNonRoot", "seccompProfile", "supplementalGroups"}
        first, *others = spec["containers"]
        assert {"name": "X", "value": "1"} in first["env"]
        assert [each["name"] for each in others] == ["proxy"]
    assert {"name": "health", "containerPort": 18081, "protocol": "TCP"} in (
        deployment["spec"]["template"]["spec"]["containers"][0]["ports"]
    )


def test_values_of_an_older_release_render_as_the_defaults(plane: ControlPlane) -> None:
    keys = json.loads((CHART / "values.schema.json").read_text())["properties"].keys() - {"global", "images"}
    options = [word for key in sorted(keys) for word in ("--set", f"{key}=null")]
    assert rendered_chart(plane, *options, "--set", "webhook=null") == rendered_chart(plane)
    kept = rendered_chart(plane, "--set", "crds.install=false,webhook.certificate=null")
    assert of_kind(kept, "CustomResourceDefinition") == [], "what is false stays so"


def test_a_release_may_be_called_by_a_digit(plane: ControlPlane) -> None:
    command = [plane.binaries / "helm", "template", "2nd", CHART, "--namespace", "tq-system"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    dry_run(plane, [document for document in yaml.safe_load_all(text) if document])


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
