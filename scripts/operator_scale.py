"""How the operator bears a large cluster: many queues and injected pods against a real apiserver without kubelets.

``python scripts/operator_scale.py --queues 1000 --pods 10000`` prints one JSON object. It takes many minutes.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.integration.operator.conftest import (
    RELEASE,
    USER,
    Operator,
    environment,
    rendered_chart,
    write_certificate,
)
from tests.integration.operator.control_plane import ControlPlane, control_plane, free_port, process
from tests.waiting import wait_until

_QUEUES = "/apis/transferqueue.io/v1alpha1/namespaces/default/transferqueues"
_QUIET_S = 10.0
_WRITTEN = "configmaps|deployments|events|poddisruptionbudgets|secrets|services|statefulsets|transferqueues"
_WRITES = (
    rf'^apiserver_request_total{{.*resource="({_WRITTEN})".*subresource="(\w*)"'
    r'.*verb="(?:APPLY|PATCH|POST|PUT|DELETE)".*} (\d+)$'
)
_OTHERS = {("deployments", "status"), ("statefulsets", "status")}
"""Written by Kubernetes' own controllers, for example once a Deployment had no ready pod for ten minutes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queues", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=50.0, help="pods a second, at most")
    parser.add_argument("--idle", type=float, default=600.0, help="seconds at rest, in which nothing may be written")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds until all queues must be seen to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as text, control_plane(Path(text)) as plane:
        folder, webhook, health = Path(text), free_port(), free_port()
        _install(plane)
        write_certificate(plane, folder / "certificates")
        variables = environment(plane, folder / "certificates", webhook, health, TQ_RESYNC_SECONDS="300")
        with process([sys.executable, "-m", "tq_operator"], folder / "log", **variables) as child:
            running = Operator(plane, child, health, folder / "log")
            wait_until(running.ready, "the operator is ready", 120)
            _register(plane, webhook)
            print(json.dumps(_measure(plane, running, options), indent=2))
    return 0


def _install(plane: ControlPlane) -> None:
    plane.kubectl("create", "namespace", RELEASE[1])
    for manifest in rendered_chart(plane):
        if manifest["kind"] in {"ClusterRoleBinding", "RoleBinding"}:
            manifest["subjects"] = [{"kind": "User", "name": USER, "apiGroup": "rbac.authorization.k8s.io"}]
        if manifest["kind"].endswith(("Definition", "Role", "RoleBinding")):
            plane.apply(yaml.safe_dump(manifest))
    wait_until(lambda: plane.kubectl("get", "transferqueues").returncode == 0, "the definitions are served", 120)


def _register(plane: ControlPlane, port: int) -> None:
    authority = base64.b64encode(plane.authority.files.certificate.read_bytes()).decode()
    for manifest in rendered_chart(plane):
        if manifest["kind"].endswith("WebhookConfiguration"):
            for entry in manifest["webhooks"]:
                path = entry["clientConfig"]["service"]["path"]
                entry["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": authority}
            plane.apply(yaml.safe_dump(manifest))


def _measure(plane: ControlPlane, running: Operator, options: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    _create(plane, _QUEUES, (_queue(number) for number in range(options.queues)))

    def seen() -> bool:
        items = plane.request("GET", _QUEUES)["items"]
        return all(item.get("status", {}).get("conditions") for item in items)

    wait_until(seen, "every queue has a status", options.timeout, pause_s=2.0)
    created_s, began = time.monotonic() - began, time.monotonic()
    pods = (_pod(number, number % options.queues) for number in range(options.pods))
    _create(plane, "/api/v1/namespaces/default/pods", _paced(pods, options.rate))
    injected_s = time.monotonic() - began

    def counted() -> bool:
        items = plane.request("GET", _QUEUES)["items"]
        return bool(sum(item["status"]["injected"] for item in items) == options.pods)

    wait_until(counted, "every pod is counted", options.timeout, pause_s=2.0)

    def at_rest() -> bool:  # Kubernetes' own controllers go on for minutes
        written = _writes(plane)
        time.sleep(_QUIET_S)
        return _writes(plane) == written

    wait_until(at_rest, "nothing is written any more", options.timeout)
    settled_s = time.monotonic() - began - injected_s
    before, busy = time.monotonic(), _cpu_s(running.child.pid)
    written, others = _writes(plane), _writes(plane, others=True)
    while time.monotonic() - before < options.idle:  # the time is what is measured here
        time.sleep(1)
    with urllib.request.urlopen(f"http://127.0.0.1:{running.health}/metrics", timeout=60) as answer:
        metrics = answer.read().decode()
    status = Path(f"/proc/{running.child.pid}/status").read_text()
    return {
        "queues": options.queues,
        "pods": options.pods,
        "queues_seconds": round(created_s, 1),
        "pods_seconds": round(injected_s, 1),
        "settled_seconds": round(settled_s, 1),
        "reconcile_p99_below_s": _quantile(metrics, "tq_operator_reconcile_seconds", 0.99),
        "injection_p99_below_s": _quantile(metrics, "tq_operator_admission_seconds", 0.99, 'webhook="inject"'),
        "rss_mib": int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) // 1024,
        "peak_rss_mib": int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) // 1024,
        "cpu_ms_of_a_reconcile": round(1000 * busy / max(1, _count(metrics, "tq_operator_reconcile_seconds"))),
        "writes_at_rest": _writes(plane) - written,
        "writes_of_kubernetes_at_rest": _writes(plane, others=True) - others,
        "idle_seconds": options.idle,
    }


def _queue(number: int) -> dict[str, Any]:
    metadata = {"name": f"queue-{number}"}
    spec = {"backend": {"simple": {}}, "storage": {"replicas": 0}}
    return {"apiVersion": "transferqueue.io/v1alpha1", "kind": "TransferQueue", "metadata": metadata, "spec": spec}


def _pod(number: int, queue: int) -> dict[str, Any]:
    metadata = {"name": f"pod-{number}", "labels": {"transferqueue.io/inject": f"queue-{queue}"}}
    spec = {"containers": [{"name": "trainer", "image": "trainer:1"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _create(plane: ControlPlane, path: str, objects: Iterable[dict[str, Any]]) -> None:
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda body: plane.request("POST", path, body), objects):
            pass


def _paced(objects: Iterable[dict[str, Any]], rate: float) -> Iterator[dict[str, Any]]:
    began = time.monotonic()
    for number, body in enumerate(objects):
        time.sleep(max(0.0, began + number / rate - time.monotonic()))
        yield body


def _writes(plane: ControlPlane, *, others: bool = False) -> int:
    """How often objects were written so far by the operator, or by Kubernetes' own controllers."""
    found = re.finditer(_WRITES, plane.request("GET", "/metrics"), re.MULTILINE)
    return sum(int(each[3]) for each in found if ((each[1], each[2]) in _OTHERS) is others)


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _count(metrics: str, name: str) -> int:
    return int(sum(float(found[1]) for found in re.finditer(rf"^{name}_count{{.*}} (\S+)$", metrics, re.MULTILINE)))


def _quantile(metrics: str, name: str, quantile: float, labels: str = "") -> float:
    """The upper edge of the bucket that holds the quantile."""
    buckets: dict[float, float] = {}
    for found in re.finditer(rf"^{name}_bucket{{(.*)}} (\S+)$", metrics, re.MULTILINE):
        edge = re.search(r'le="([^"]+)"', found[1])
        if edge and labels in found[1]:
            buckets[float(edge[1])] = buckets.get(float(edge[1]), 0.0) + float(found[2])
    total = max(buckets.values())
    return min(edge for edge, count in buckets.items() if count >= quantile * total)


if __name__ == "__main__":
    sys.exit(main())
