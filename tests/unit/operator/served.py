"""Kinds of Kubernetes' own API by version, as every Kubernetes from 1.29 to 1.36 serves them, and what is newer."""

from __future__ import annotations

SERVED = {
    "v1": {"ConfigMap", "Namespace", "PersistentVolumeClaim", "Pod", "Secret", "Service", "ServiceAccount"},
    "admissionregistration.k8s.io/v1": {"MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"},
    "apiextensions.k8s.io/v1": {"CustomResourceDefinition"},
    "apps/v1": {"DaemonSet", "Deployment", "StatefulSet"},
    "networking.k8s.io/v1": {"NetworkPolicy"},
    "policy/v1": {"PodDisruptionBudget"},
    "rbac.authorization.k8s.io/v1": {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"},
}
NEWER = {"resource.k8s.io/v1": {"ResourceClaimTemplate"}}
"""Since 1.34."""
