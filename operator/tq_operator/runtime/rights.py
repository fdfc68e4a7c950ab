"""Does the operator have the rights that it needs? Asked at its start, so that what is missing is named once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tq_operator.runtime.cluster import Cluster
from transfer_queue.config.defaults import GROUP

__all__ = ["NEEDED", "missing_rights"]

_OWNED = ("get", "list", "watch", "create", "patch", "delete")
NEEDED: Mapping[tuple[str, str], tuple[str, ...]] = {
    (GROUP, "transferqueues"): ("get", "list", "watch"),
    (GROUP, "transferqueues/status"): ("patch",),
    (GROUP, "transferqueues/finalizers"): ("update",),
    (GROUP, "transferqueuebindings"): ("list",),
    (GROUP, "transferqueuebindings/status"): ("patch",),
    ("", "configmaps"): _OWNED,
    ("", "persistentvolumeclaims"): _OWNED,
    ("", "services"): _OWNED,
    ("", "secrets"): _OWNED,
    ("cert-manager.io", "certificates"): ("get", "list", "create", "patch", "delete"),
    ("apps", "deployments"): _OWNED,
    ("apps", "statefulsets"): _OWNED,
    ("policy", "poddisruptionbudgets"): _OWNED,
    ("networking.k8s.io", "networkpolicies"): _OWNED,
    ("resource.k8s.io", "resourceclaimtemplates"): ("get", "list", "create", "patch", "delete"),
    ("", "pods"): ("get", "list", "watch"),
    ("", "events"): ("list",),
    ("events.k8s.io", "events"): ("create",),
}
"""(group, resource) -> verbs, in every namespace the operator works in."""
_LEASE = ("get", "create", "update")


def missing_rights(cluster: Cluster, namespaces: Sequence[str], lease_namespace: str) -> list[str]:
    """Blocking. Lines such as ``patch deployments.apps in all namespaces``; raises ClusterError."""
    wanted = [
        (namespace, group, resource, verb)
        for namespace in namespaces or ("",)
        for (group, resource), verbs in NEEDED.items()
        for verb in verbs
    ]
    if lease_namespace:
        wanted += [(lease_namespace, "coordination.k8s.io", "leases", verb) for verb in _LEASE]
    missing = []
    for namespace, group, resource, verb in wanted:
        name, _, part = resource.partition("/")
        attributes = {"namespace": namespace, "group": group, "resource": name, "subresource": part, "verb": verb}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = cluster.call("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
        if not answer.get("status", {}).get("allowed"):
            where = f"namespace {namespace}" if namespace else "all namespaces"
            missing.append(f"{verb} {resource}{'.' if group else ''}{group} in {where}")
    return missing
