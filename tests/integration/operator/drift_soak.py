"""A soak of the operator: ``python -m tests.integration.operator.drift_soak --minutes 60 [--seed 1]``.

Two operators with the rights that the chart gives them, on a control plane without nodes, whose pods are said to be
ready. At random somebody changes any field of any child, deletes pods, ends or kills an operator, replaces the CA of
the webhook or of a queue, and scales. After each, all children are as the queue wants them within 30 s. Meanwhile pods
are created without a pause, and somebody outside checks that Services of Ready queues lead to pods.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from kubernetes import config
from kubernetes.dynamic.exceptions import ConflictError, NotFoundError

from tests.integration.operator.conftest import RELEASE, USER, chart_plane, environment, rendered_chart
from tests.integration.operator.control_plane import ControlPlane, free_port
from tests.integration.operator.drift import (
    BACK_S,
    QUEUES,
    Actor,
    Watcher,
    children_of,
    is_ready,
    kubelet,
    until_back,
)
from tests.waiting import meanwhile, wait_until
from tq_operator.plan.names import INJECT_LABEL, INJECTED_ANNOTATION
from tq_operator.runtime.cluster import Cluster, ClusterError

NAMESPACE = "soaking"
NAME = "localhost"
SECRET = f"/api/v1/namespaces/{RELEASE[1]}/secrets/{NAME}-webhook-tls"
KILL_S = 2.0
"""After the kill of a replica, for which its connections may still be refused: docs/operator.md."""


class Front:
    """The Service of the webhook: passes a connection on to one of the replicas that answer."""

    def __init__(self) -> None:
        self.targets: list[int] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._turn = itertools.count()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        targets = list(self.targets)
        first = next(self._turn) % max(1, len(targets))
        for target in targets[first:] + targets[:first]:
            with suppress(OSError):
                other = socket.create_connection(("127.0.0.1", target), timeout=5)
                other.settimeout(None)
                threading.Thread(target=_pump, args=(other, peer), daemon=True).start()
                _pump(peer, other)
                return
        peer.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for each in (source, sink):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@dataclass
class Replica:
    """An operator that can be ended and started again."""

    plane: ControlPlane
    folder: Path
    front: Front
    webhook: int = field(default_factory=free_port)
    health: int = field(default_factory=free_port)
    child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        variables = environment(
            self.plane, self.folder / "served", self.webhook, self.health, TQ_LEASE_NAME=NAME, TQ_RESYNC_SECONDS="300"
        )
        variables |= {"TQ_WEBHOOK_NAME": NAME, "TQ_WEBHOOK_SECRET": f"{NAME}-webhook-tls"}
        with (self.folder / f"operator-{self.health}.log").open("ab") as log:
            command = [sys.executable, "-m", "tq_operator"]
            self.child = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **variables})
        wait_until(self.ready, "the operator is ready", 120)
        self.front.targets.append(self.webhook)

    def ready(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.health}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    def end(self, *, kill: bool = False) -> None:
        assert self.child is not None
        if not kill:  # a terminating pod leaves the endpoints, and the kubelet calls the hook of the chart
            self.front.targets.remove(self.webhook)
            urllib.request.urlopen(f"http://127.0.0.1:{self.health}/leave", timeout=30).close()
        (self.child.kill if kill else self.child.terminate)()
        self.child.wait(60)
        if kill:
            self.front.targets.remove(self.webhook)


@dataclass
class Pods:
    """Pods that ask for a queue, one after the other, and those that were refused."""

    count: int = 0
    refused: list[tuple[float, float, str]] = field(default_factory=list)
    """When it was asked for and when it was refused, and the words."""

    @contextmanager
    def being_made(self, cluster: Cluster) -> Iterator[None]:
        queues = itertools.cycle(QUEUES)
        spec = {"containers": [{"name": "main", "image": "any"}]}

        def work() -> None:
            pod = {"apiVersion": "v1", "kind": "Pod", "spec": spec}
            pod["metadata"] = {"generateName": "asks-", "labels": {INJECT_LABEL: next(queues)}}
            self.count += 1
            began = time.monotonic()
            words = ""
            try:
                path = f"/api/v1/namespaces/{NAMESPACE}/pods"
                made = cluster.call("POST", path, pod, [("dryRun", "All")])
                if INJECTED_ANNOTATION not in made["metadata"].get("annotations", {}):
                    words = "made without its queue"
            except ClusterError as error:
                words = str(error)
            if words:
                self.refused.append((began, time.monotonic(), words))
                lasted = time.monotonic() - began
                print(f"{time.strftime('%H:%M:%S')} a pod was refused after {lasted:.1f} s: {words}", flush=True)

        with meanwhile(work):
            yield


class Soak:
    """One run. ``failures``: what was not as it has to be."""

    def __init__(self, plane: ControlPlane, replicas: list[Replica], seed: int) -> None:
        self.cluster = Cluster(config.new_client_from_config(str(plane.kubeconfig)))
        self.plane, self.replicas = plane, replicas
        self.rng = random.Random(seed)
        self.actor, self.watcher, self.pods = Actor(self.cluster, self.rng), Watcher(), Pods()
        self.done: Counter[str] = Counter()
        self.failures: list[str] = []
        self.kills: list[float] = []
        self.returns: list[tuple[float, str]] = []
        """Seconds until all children were as wanted, after each step."""
        self.before: dict[str, Any] = {}

    def run(self, seconds: float) -> None:
        steps: list[tuple[Callable[[str], str], int]] = [
            (self.drift, 76),
            (self.delete_a_pod, 6),
            (self.end_an_operator, 4),
            (self.kill_an_operator, 2),
            (self.replace_the_webhooks_ca, 2),
            (self.replace_a_queues_ca, 4),
            (self.scale, 6),
        ]
        with kubelet(self.cluster, NAMESPACE):
            wait_until(self.all_ready, "the queues are ready", 120)
            for name in QUEUES:
                self.before[name] = children_of(self.cluster, NAMESPACE, name)
            end = time.monotonic() + seconds
            with self.watcher.watching(self.cluster, NAMESPACE), self.pods.being_made(self.cluster):
                while time.monotonic() < end:
                    (step,) = self.rng.choices([each for each, _ in steps], [weight for _, weight in steps])
                    self.one(step)
            wait_until(self.all_ready, "the queues are ready again", BACK_S)

    def one(self, step: Callable[[str], str]) -> None:
        queue = self.rng.choice(sorted(QUEUES))
        words, began = step(queue), time.monotonic()
        self.done[step.__name__] += 1
        print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)
        for name in QUEUES:
            if why := until_back(self.cluster, NAMESPACE, name, self.before[name], BACK_S):
                self.failures.append(f"after {words}: {name}: {why}")
                print(f"FAILED {self.failures[-1]}", flush=True)
                until_back(self.cluster, NAMESPACE, name, self.before[name], 600)
        self.returns.append((time.monotonic() - began, words))

    def all_ready(self) -> bool:
        return all(is_ready(self.cluster.queue(NAMESPACE, name) or {}) for name in QUEUES)

    def drift(self, queue: str) -> str:
        return self.actor.change(NAMESPACE, queue)

    def delete_a_pod(self, queue: str) -> str:
        pods = self.cluster.call("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
        name = self.rng.choice(pods)["metadata"]["name"]
        with suppress(NotFoundError):
            self.cluster.call("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}")
        return f"pod {name} deleted"

    def end_an_operator(self, queue: str, *, kill: bool = False) -> str:
        replica = self.rng.choice(self.replicas)
        if kill:
            self.kills.append(time.monotonic())
        replica.end(kill=kill)
        words = self.actor.change(NAMESPACE, queue)
        replica.start()
        return f"an operator {'killed' if kill else 'ended'}, and {words}"

    def kill_an_operator(self, queue: str) -> str:
        return self.end_an_operator(queue, kill=True)

    def replace_the_webhooks_ca(self, queue: str) -> str:
        old = self.cluster.call("GET", SECRET)["data"]["ca.crt"]
        self.cluster.call("DELETE", SECRET)

        def replaced() -> bool:
            with suppress(NotFoundError):
                return bool(self.cluster.call("GET", SECRET)["data"]["ca.crt"] != old)
            return False

        wait_until(replaced, "the webhook has another CA", BACK_S)
        return "the CA of the webhook replaced"

    def replace_a_queues_ca(self, queue: str) -> str:
        path = f"/api/v1/namespaces/{NAMESPACE}/secrets/cold-tls-"
        old = self.cluster.call("GET", f"{path}ca")["data"]
        if self.rng.random() < 0.5:
            self.cluster.call("DELETE", f"{path}ca")
        else:
            change = {"data": {self.rng.choice(sorted(old)): base64.b64encode(b"foreign").decode()}}
            self.cluster.call("PATCH", f"{path}ca", change, None, "application/merge-patch+json")

        def issued() -> bool:
            with suppress(NotFoundError):
                authority, server = (self.cluster.call("GET", f"{path}{part}")["data"] for part in ("ca", "server"))
                trusted, new = (base64.b64decode(each["ca.crt"]) for each in (server, authority))
                return authority != old and trusted.startswith(new)
            return False

        wait_until(issued, "the servers of the queue trust the new CA", BACK_S)
        return "the CA of a queue replaced"

    def scale(self, queue: str) -> str:
        count = self.rng.randint(1, 4)
        path = f"/apis/transferqueue.io/v1alpha1/namespaces/{NAMESPACE}/transferqueues/{queue}"
        change = {"spec": {"storage": {"replicas": count}}}
        with suppress(ConflictError):
            self.cluster.call("PATCH", path, change, None, "application/merge-patch+json")
            before = self.before[queue]
            before["StatefulSet", f"{queue}-storage"]["spec"]["replicas"] = count
            files = before["ConfigMap", f"{queue}-config"]["data"]
            for name, text in files.items():
                files[name] = re.sub(r"expectedUnits: \d+", f"expectedUnits: {count}", text)
        return f"{queue} scaled to {count}"

    def report(self, seconds: float) -> dict[str, Any]:
        late = [
            words
            for began, ended, words in self.pods.refused
            if not any(began - KILL_S < at < ended for at in self.kills)  # also one that the killed replica looked at
        ]
        ordered = sorted(self.returns) or [(0.0, "")]
        return {
            "minutes": round(seconds / 60, 1),
            "done": dict(self.done),
            "refused by the apiserver": self.actor.refused,
            "returns: median, 90 %, 99 %": [round(ordered[len(ordered) * of // 100][0], 1) for of in (50, 90, 99)],
            "slowest returns": [[round(lasted, 1), words] for lasted, words in ordered[:-4:-1]],
            "Ready without endpoints, longest": [round(self.watcher.longest_s, 1), self.watcher.worst],
            "pods": self.pods.count,
            "pods refused": len(late),
            "pods refused while a killed replica was still an endpoint": len(self.pods.refused) - len(late),
            "failures": self.failures + late[:5],
        }


def _webhooks(plane: ControlPlane, front: Front) -> None:
    applied = []
    for manifest in yaml.safe_load_all(yaml.safe_dump_all(rendered_chart(plane)).replace("tq-operator", NAME)):
        if manifest["kind"].endswith("RoleBinding"):
            manifest["subjects"] = [{"kind": "User", "name": USER, "apiGroup": "rbac.authorization.k8s.io"}]
        for entry in manifest.get("webhooks", []):
            path = entry["clientConfig"]["service"]["path"]
            entry["clientConfig"] = {"url": f"https://{NAME}:{front.port}{path}"}
        kinds = {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
        if manifest["kind"] in kinds or manifest["kind"].endswith("WebhookConfiguration"):
            applied.append(manifest)
    plane.apply(yaml.safe_dump_all(applied))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.operator.drift_soak")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="transferqueue-drift-")))
        plane, front = stack.enter_context(chart_plane(folder)), Front()
        _webhooks(plane, front)
        replicas = []
        for number in range(2):
            (folder / str(number)).mkdir()
            replicas.append(Replica(plane, folder / str(number), front))
            stack.callback(replicas[-1].end, kill=True)
            replicas[-1].start()
        plane.kubectl("create", "namespace", NAMESPACE)
        for name, spec in QUEUES.items():
            head = f"apiVersion: transferqueue.io/v1alpha1\nkind: TransferQueue\nmetadata: {{name: {name}, namespace: "
            plane.apply(f"{head}{NAMESPACE}}}\nspec: {spec}\n")
        soak, began = Soak(plane, replicas, options.seed), time.monotonic()
        try:
            soak.run(60 * options.minutes)
        finally:
            found = soak.report(time.monotonic() - began)
            print(json.dumps(found, indent=1), flush=True)
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
