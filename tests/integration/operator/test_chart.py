"""The chart as helm renders it."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import yaml

from tests.integration.operator.conftest import CHART, rendered_chart
from tests.integration.operator.control_plane import ControlPlane

pytestmark = pytest.mark.timeout(1200)


def of_kind(manifests: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def test_the_apiserver_accepts_every_manifest(plane: ControlPlane) -> None:
    for manifest in rendered_chart(plane):
        done = plane.kubectl(
            "apply", "--server-side", "--dry-run=server", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump(manifest)
        )
        assert done.returncode == 0, (manifest["kind"], done.stderr)


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
    assert len(definitions) == 2
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
