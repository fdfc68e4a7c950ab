"""What a queue with ``rdma.claim`` asks of dynamic resource allocation: templates, of which each pod gets a claim.

A template cannot be changed. So its name has a hash of what it says, and another device class is another template, with
which the storage pods start again.
"""

from __future__ import annotations

import json

from tq_operator.plan.names import digest
from tq_operator.plan.pods import manifest
from tq_operator.plan.queue import Manifest, Queue

__all__ = ["CLAIM", "claim_templates", "client_claim", "storage_claim"]

CLAIM = "rdma"
"""Name of the claim in a pod, and of the request for the RDMA device in the claim."""
_GPU = "gpu"
_SAME_ROOT = "resource.kubernetes.io/pcieRoot"


def claim_templates(queue: Queue) -> list[Manifest]:
    """The templates of all pods; none where the queue has no claim or its bytes move over TCP."""
    templates = [_template(queue, gpu=False), _template(queue, gpu=True)]
    return [template for template in templates if template is not None]


def storage_claim(queue: Queue) -> Manifest | None:
    """The claim of a storage pod, as an entry of ``spec.resourceClaims``."""
    return _entry(_template(queue, gpu=False))


def client_claim(queue: Queue) -> Manifest | None:
    """The claim of a pod that is given the queue, as an entry of ``spec.resourceClaims``."""
    return _entry(_template(queue, gpu=True) or _template(queue, gpu=False))


def _entry(template: Manifest | None) -> Manifest | None:
    return template and {"name": CLAIM, "resourceClaimTemplateName": template["metadata"]["name"]}


def _template(queue: Queue, *, gpu: bool) -> Manifest | None:
    claim = queue.spec.rdma.claim
    if claim is None or queue.transport != "rdma" or (gpu and claim.gpu_device_class_name is None):
        return None
    devices: Manifest = {"requests": [_request(CLAIM, claim.device_class_name)]}
    if gpu:
        devices["requests"].append(_request(_GPU, claim.gpu_device_class_name))
        devices["constraints"] = [{"requests": [CLAIM, _GPU], "matchAttribute": _SAME_ROOT}]
    spec = {"spec": {"devices": devices}}
    part = "rdma-gpu" if gpu else "rdma"
    name = queue.child(f"{part}-{digest(json.dumps(spec, sort_keys=True))}")
    made = manifest(queue, "resource.k8s.io/v1", "ResourceClaimTemplate", part, spec=spec)
    return {**made, "metadata": {**made["metadata"], "name": name}}


def _request(name: str, device_class: str | None) -> Manifest:
    return {"name": name, "exactly": {"deviceClassName": device_class}}  # one device
