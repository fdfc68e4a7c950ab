"""Queues for tests, as the apiserver would hold them."""

from __future__ import annotations

from typing import Any

import yaml

from tq_operator.plan.queue import Images, Queue
from transfer_queue.config import resource

IMAGES = Images(server="registry.example/server:1", mooncake="registry.example/mooncake:1")


def document(spec: str, name: str = "quickstart", namespace: str = "rl", **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "transferqueue.io/v1alpha1",
        "kind": "TransferQueue",
        "metadata": {"name": name, "namespace": namespace, "uid": "11111111-2222", "generation": 3, **metadata},
        "spec": yaml.safe_load(spec),
    }


def queue(spec: str, name: str = "quickstart", namespace: str = "rl") -> Queue:
    found = resource.parse(document(spec, name, namespace))
    tls = found.spec.tls_mode("off")
    return Queue(found, "11111111-2222", 3, tls=tls, running_tls=tls)
