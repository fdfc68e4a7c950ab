"""A real apiserver over a real etcd on loopback, with the controllers of Kubernetes; no kubelet: pods stay Pending."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.binaries import build_binaries
from tests.cluster.pki import Authority, KeyPair
from tests.waiting import wait_until

START_SECONDS = 90.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def process(command: Sequence[str | Path], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block; its output goes to ``log``."""
    with log.open("wb") as output:
        started = subprocess.Popen(
            [str(part) for part in command], stdout=output, stderr=output, env={**os.environ, **environment}
        )
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(10)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


class ControlPlane:
    """Where the apiserver is, and ``kubectl`` against it."""

    def __init__(self, folder: Path, server: str, authority: Authority, admin: KeyPair, binaries: Path) -> None:
        self.folder = folder
        self.server = server
        self.authority = authority
        self.binaries = binaries
        self.kubeconfig = authority.kubeconfig(folder / "admin.kubeconfig", server, admin)
        self._context = ssl.create_default_context(cafile=str(authority.files.certificate))
        self._context.load_cert_chain(admin.certificate, admin.key)
        self._paths: dict[str, str] = {}

    def kubeconfig_for(self, user: str, group: str = "") -> Path:
        """Client configuration of ``user``, who has no rights of its own."""
        name = user.replace(":", "-")
        return self.authority.kubeconfig(
            self.folder / f"{name}.kubeconfig", self.server, self.authority.issue(name, user, group)
        )

    def ready(self) -> bool:
        try:
            return self.request("GET", "/readyz") == "ok"
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Call the apiserver as its administrator. Raises HTTPError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.server}{path}", data, {"Content-Type": "application/json"}, method=method
        )
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._context)
        )
        with opener.open(request, timeout=60) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith("{") else text

    def kubectl(self, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.binaries / "kubectl", f"--kubeconfig={self.kubeconfig}", *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def apply(self, manifest: str) -> None:
        done = self.kubectl("apply", "--server-side", "-f", "-", stdin=manifest)
        assert done.returncode == 0, done.stderr

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any] | None:
        """An object by a name of its kind that kubectl knows; a call to the apiserver, as tests ask again and again."""
        try:
            found: dict[str, Any] = self.request("GET", f"{self._path(kind).format(namespace=namespace)}/{name}")
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return None
                raise
        found["metadata"].pop("managedFields", None)
        return found

    def _path(self, kind: str) -> str:
        """Where the objects of a kind are, with {namespace} for their namespace."""
        if kind not in self._paths:
            for line in self.kubectl("api-resources", "--no-headers").stdout.splitlines():
                plural, *short, version, namespaced, singular = line.split()
                root = f"/apis/{version}" if "/" in version else f"/api/{version}"
                path = root + ("/namespaces/{namespace}/" if namespaced == "true" else "/") + plural
                for each in (plural, singular.lower(), *(name for names in short for name in names.split(","))):
                    self._paths.setdefault(each, path)
        assert kind in self._paths, f"the apiserver has no kind {kind}"
        return self._paths[kind]


@contextmanager
def control_plane(folder: Path) -> Iterator[ControlPlane]:
    """Start etcd, kube-apiserver and kube-controller-manager; all end with the block."""
    binaries = build_binaries()
    authority = Authority(folder / "pki")
    etcd, peer, port = free_port(), free_port(), free_port()
    admin = authority.issue("admin", "cluster-admin", "system:masters")
    plane = ControlPlane(folder, f"https://127.0.0.1:{port}", authority, admin, binaries)
    keys = authority.signing_key("service-accounts")
    serving = authority.issue("kube-apiserver", "kube-apiserver", hosts=("127.0.0.1",))
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                process(
                    [
                        binaries / "etcd",
                        f"--data-dir={folder / 'etcd'}",
                        f"--listen-client-urls=http://127.0.0.1:{etcd}",
                        f"--advertise-client-urls=http://127.0.0.1:{etcd}",
                        f"--listen-peer-urls=http://127.0.0.1:{peer}",
                        f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
                        f"--initial-cluster=default=http://127.0.0.1:{peer}",
                        "--unsafe-no-fsync=true",
                    ],
                    folder / "etcd.log",
                )
            ),
            stack.enter_context(
                process(
                    [
                        binaries / "kube-apiserver",
                        f"--etcd-servers=http://127.0.0.1:{etcd}",
                        f"--secure-port={port}",
                        "--bind-address=127.0.0.1",
                        "--advertise-address=127.0.0.1",
                        "--endpoint-reconciler-type=none",
                        "--service-cluster-ip-range=10.96.0.0/16",
                        f"--tls-cert-file={serving.certificate}",
                        f"--tls-private-key-file={serving.key}",
                        f"--client-ca-file={authority.files.certificate}",
                        f"--service-account-key-file={keys.certificate}",
                        f"--service-account-signing-key-file={keys.key}",
                        "--service-account-issuer=https://kubernetes.default.svc",
                        "--authorization-mode=RBAC",
                    ],
                    folder / "apiserver.log",
                )
            ),
        ]

        def ready() -> bool:
            for child in started:
                assert child.poll() is None, f"{child.args} ended: see {folder}/*.log"
            return plane.ready()

        wait_until(ready, "the apiserver is ready", START_SECONDS)
        stack.enter_context(
            process(
                [
                    binaries / "kube-controller-manager",
                    f"--kubeconfig={plane.kubeconfig}",
                    f"--service-account-private-key-file={keys.key}",
                    f"--root-ca-file={authority.files.certificate}",
                    "--leader-elect=false",
                    "--secure-port=0",
                    "--horizontal-pod-autoscaler-sync-period=1s",
                ],
                folder / "controllers.log",
            )
        )
        wait_until(lambda: plane.get("serviceaccount", "default"), "the controllers work", START_SECONDS)
        yield plane
