"""``spec.checkpoint`` and ``spec.restoreFrom`` against a real apiserver and a real queue.

No kubelet runs here: the test runs what the pod would run, with the settings that the operator gives it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import transfer_queue as tq
from tests.integration.operator.conftest import REPOSITORY, Operator
from tests.integration.operator.control_plane import ControlPlane, free_port
from tests.integration.operator.test_operator import condition
from tests.waiting import wait_until
from transfer_queue.launch.local import LocalStack, default_plan

pytestmark = pytest.mark.timeout(1200)  # the first run builds Kubernetes

QUEUE = """
apiVersion: transferqueue.io/v1alpha1
kind: TransferQueue
metadata: {name: NAME, namespace: default}
spec:
  backend: {simple: {}}
  storage: {replicas: 1}
  checkpoint: {schedule: 1s, keep: 2, destination: PLACE/series, metricsPort: PORT, credentialsFrom: bucket}
  restoreFrom: PLACE/first
"""


@contextmanager
def pod(plane: ControlPlane, name: str, stack: LocalStack, folder: Path) -> Iterator[None]:
    """The pod of the Deployment, whose container is a process of this machine and uses the queue of ``stack``."""
    template = (plane.get("deployment", f"{name}-checkpoint") or {})["spec"]["template"]
    metadata = {"name": f"{name}-checkpoint-0", "namespace": "default", **template["metadata"]}
    spec = {**template["spec"], "nodeName": "none"}
    plane.apply(yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}))
    running = [{"name": "checkpoint", "ready": True, "restartCount": 0, "image": "i", "imageID": "i"}]
    running[0]["state"] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    status = {"phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}], "containerStatuses": running}
    patch = json.dumps({"status": status})
    done = plane.kubectl("patch", "pod", metadata["name"], "--subresource=status", "--type=merge", "-p", patch)
    assert done.returncode == 0, done.stderr
    settings = settings_of(plane, name)
    settings |= {"attach": stack.attach_config.dump(), "statusFile": str(folder / "status.json"), "host": "127.0.0.1"}
    config = folder / "checkpoint.yaml"
    config.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "transfer_queue.checkpoint.saver", "--config", str(config), "--die-with-parent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as child:
        try:
            yield
        finally:
            child.terminate()
            plane.kubectl("delete", "pod", metadata["name"], "--now", "--force")


def settings_of(plane: ControlPlane, name: str) -> Any:
    return yaml.safe_load((plane.get("configmap", f"{name}-config") or {})["data"]["checkpoint.yaml"])


def test_a_queue_starts_with_a_checkpoint_and_its_status_tells_of_those_that_follow(
    operator: Operator, tmp_path: Path
) -> None:
    plane, name = operator.plane, "kept"
    with LocalStack(default_plan(units=1, unit_capacity=16 << 20)).start() as stack:
        tq.init({"controller": {"addresses": stack.controller_addresses}})
        tq.kv_put("k", "p", {"x": torch.arange(3)})
        tq.save_checkpoint(tmp_path / "first")
        tq.close()
    text = QUEUE.replace("NAME", name).replace("PLACE", str(tmp_path)).replace("PORT", str(free_port()))
    plane.apply(text)
    try:
        wait_until(lambda: condition(plane, name, "Restored"), "the queue has a status")
        assert condition(plane, name, "Restored")["reason"] == "RestorePending"
        assert "the restore" in condition(plane, name, "Ready")["message"]
        (container,) = plane.get("deployment", f"{name}-checkpoint")["spec"]["template"]["spec"]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "bucket"}}]
        version = plane.get("deployment", f"{name}-checkpoint")["metadata"]["generation"]
        with LocalStack(default_plan(units=1, unit_capacity=16 << 20)).start() as stack:
            with pod(plane, name, stack, tmp_path):
                wait_until(lambda: condition(plane, name, "Restored")["status"] == "True", "it is restored", 120)
                told = condition(plane, name, "Restored")
                assert (told["reason"], told["message"].startswith("loaded 1 rows")) == ("Restored", True)

                def last() -> dict[str, Any]:
                    return (plane.get("transferqueue", name) or {})["status"].get("lastCheckpoint", {})

                wait_until(lambda: last().get("rows") == 1, "the status tells of a checkpoint", 120)
                assert last()["url"].startswith(str(tmp_path / "series"))
                assert last()["bytes"] > 0
                wait_until(lambda: "restoreFrom" not in settings_of(plane, name), "it is not restored again")
            tq.init({"controller": {"addresses": stack.controller_addresses}})
            assert tq.kv_batch_get("k", "p")["x"][0].tolist() == [0, 1, 2]
            tq.close()
        assert plane.get("deployment", f"{name}-checkpoint")["metadata"]["generation"] == version, "no pod is replaced"
        events = plane.kubectl("get", "events", "--field-selector", "reason=Restored", "-o", "name").stdout
        assert name in events
        plane.kubectl("patch", "transferqueue", name, "--type=merge", "-p", '{"spec": {"checkpoint": null}}')
        wait_until(lambda: plane.get("deployment", f"{name}-checkpoint") is None, "the process is gone")
    finally:
        plane.kubectl("delete", "transferqueue", name, "--wait=false")
