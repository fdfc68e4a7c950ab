"""What the apiserver accepts by the schema alone, and what the library accepts, are the same."""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml

from tests.integration.operator.control_plane import ControlPlane
from tests.unit.operator.test_webhook import everywhere
from transfer_queue.config import resource
from transfer_queue.errors import ConfigError

pytestmark = pytest.mark.timeout(1200)

WHOLE = """
backend: {simple: {numUnits: 2, ssdOffload: {path: /x, thresholdBytes: 1Mi, capacity: 1Gi}}}
controller:
  port: 5000
  sampler: {name: SequentialSampler}
  leaseSeconds: 5
  durability: none
  resources: {requests: {cpu: 1}, limits: {memory: 1Gi}}
  env: [{name: A, value: b}]
storage: {replicas: 2, capacity: 1Gi, drainSeconds: 5, topologySpread: [{maxSkew: 1}]}
rdma: {policy: auto, resourceName: rdma/a}
access: {namespaces: [a]}
security: {tls: {mode: operator}}
disruptionBudget: true
"""
GARBAGE: list[Any] = [
    True,
    0,
    -1,
    2**63,
    1.5,
    "",
    "text",
    "1e3",
    "5.",
    " 1Gi",
    "9" * 40,
    [],
    ["text"],
    [None],
    {},
    {"a": None},
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
def test_the_apiserver_and_the_library_accept_the_same(plane: ControlPlane, garbage: Any) -> None:
    path = "/apis/transferqueue.io/v1alpha1/namespaces/default/transferqueues?dryRun=All&fieldValidation=Strict"
    head = {"apiVersion": "transferqueue.io/v1alpha1", "kind": "TransferQueue", "metadata": {"name": "x"}}
    for spec in everywhere(yaml.safe_load(WHOLE), garbage):
        # The apiserver leaves out the entries of maps that are null; tq up refuses them.
        if any(f'"{name}": {{"a": null}}' in json.dumps(spec) for name in ("requests", "limits")):
            continue
        words, refused = "", ""
        try:
            resource.parse({**head, "spec": spec})
        except ConfigError as error:
            words = str(error)
        try:
            plane.request("POST", path, {**head, "spec": spec})
        except HTTPError as error:
            refused = json.loads(error.read())["message"]
        assert bool(words) == bool(refused), (spec, words, refused)
