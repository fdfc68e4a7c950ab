"""etcd, the API server, the controllers, the scheduler, cluster DNS, and the way to them from the machine."""

from __future__ import annotations

import json
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.component import Component, wait_until
from tests.cluster.network import ANY, API_SERVICE, CONTROL, DNS_SERVICE, IPV6, SERVICE_RANGE, in_url
from tests.cluster.paths import SOURCE, state_folder
from tests.cluster.pki import Authority, KeyPair

API_PORT = 6443
ETCD_PORT = 2379
START_SECONDS = 90.0
INTERNAL_SERVER = f"https://{in_url(CONTROL.address)}:{API_PORT}"


@dataclass(frozen=True)
class ControlPlane:
    """The control plane's programs, from the folder `binaries`, in the namespace of CONTROL."""

    binaries: Path

    @property
    def components(self) -> tuple[Component, ...]:
        """Its programs in the order they start."""
        names = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns")
        forwarder = Component("forwarder", Path(sys.executable))
        return (*(Component(name, self.binaries / name) for name in names), forwarder)

    def start(self, authority: Authority) -> None:
        """Start everything and wait until the API server is ready."""
        state = state_folder()
        etcd, api, controllers, scheduler, dns, forwarder = self.components
        self._run(etcd, self._etcd_flags(state))
        keys = authority.signing_key("service-accounts")
        self._run(api, self._api_flags(authority, keys))
        port = self._start_forwarder(forwarder)
        admin = authority.issue("admin", "cluster-admin", group="system:masters")
        server = f"https://127.0.0.1:{port}"
        authority.kubeconfig(admin_kubeconfig(), server, admin)
        started = (etcd, api, forwarder)
        wait_until(lambda: self._ready(server, authority, admin), "the API server is ready", START_SECONDS, started)

        credentials = self._credentials(authority, controllers.name, "system:kube-controller-manager")
        self._run(controllers, self._controller_flags(credentials, authority, keys))
        credentials = self._credentials(authority, scheduler.name, "system:kube-scheduler")
        self._run(scheduler, {"kubeconfig": credentials, "leader-elect": "false"})
        (state / "Corefile").write_text(_corefile(self._credentials(authority, dns.name, "system:coredns")))
        dns.start(["-conf", state / "Corefile"], enter=self._enter())

    def _etcd_flags(self, state: Path) -> dict[str, object]:
        client = f"http://127.0.0.1:{ETCD_PORT}"
        peer = f"http://127.0.0.1:{ETCD_PORT + 1}"
        return {
            "data-dir": state / "etcd",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "unsafe-no-fsync": "true",  # the data dies with the cluster
        }

    def _api_flags(self, authority: Authority, keys: KeyPair) -> dict[str, object]:
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
        hosts = ("127.0.0.1", "localhost", CONTROL.address, API_SERVICE, *names)
        serving = authority.issue("kube-apiserver", "kube-apiserver", hosts=hosts)
        client = authority.issue("kubelet-client", "kube-apiserver-kubelet-client", group="system:masters")
        return {
            "etcd-servers": f"http://127.0.0.1:{ETCD_PORT}",
            "secure-port": API_PORT,
            "bind-address": ANY,
            "advertise-address": CONTROL.address,
            "service-cluster-ip-range": SERVICE_RANGE,
            "tls-cert-file": serving.certificate,
            "tls-private-key-file": serving.key,
            "client-ca-file": authority.files.certificate,
            "kubelet-client-certificate": client.certificate,
            "kubelet-client-key": client.key,
            "kubelet-preferred-address-types": "InternalIP",
            "service-account-key-file": keys.certificate,
            "service-account-signing-key-file": keys.key,
            "service-account-issuer": "https://kubernetes.default.svc.cluster.local",
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "allow-privileged": "true",
            # Webhooks are called at their pods' addresses: no kube-proxy runs beside the API server.
            "enable-aggregator-routing": "true",
        }

    def _controller_flags(self, credentials: Path, authority: Authority, keys: KeyPair) -> dict[str, object]:
        return {
            "kubeconfig": credentials,
            "service-account-private-key-file": keys.key,
            "root-ca-file": authority.files.certificate,
            "cluster-signing-cert-file": authority.files.certificate,
            "cluster-signing-key-file": authority.files.key,
            "use-service-account-credentials": "true",
            "leader-elect": "false",
            "allocate-node-cidrs": "false",
        }

    def _start_forwarder(self, forwarder: Component) -> int:
        """Start it on a free port of the machine's loopback and return the port."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            target = [CONTROL.namespace, CONTROL.address, API_PORT]
            words = ["-I", SOURCE / "forwarder.py", listener.fileno(), *target]
            forwarder.start([str(word) for word in words], keep_open=(listener.fileno(),))
            port: int = listener.getsockname()[1]
        return port

    def _credentials(self, authority: Authority, name: str, user: str) -> Path:
        pair = authority.issue(name, user)
        return authority.kubeconfig(state_folder() / f"{name}.kubeconfig", INTERNAL_SERVER, pair)

    def _run(self, component: Component, flags: Mapping[str, object]) -> None:
        component.start([f"--{name}={value}" for name, value in flags.items()], enter=self._enter())

    def _enter(self) -> Sequence[str]:
        return ["nsenter", f"--net={CONTROL.namespace}", "--"]

    def _ready(self, server: str, authority: Authority, admin: KeyPair) -> bool:
        context = ssl.create_default_context(cafile=str(authority.files.certificate))
        context.load_cert_chain(admin.certificate, admin.key)
        direct = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        try:
            with direct.open(f"{server}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False


def admin_kubeconfig() -> Path:
    """The client configuration of the cluster's administrator, for use from the machine's own namespace."""
    return state_folder() / "admin.kubeconfig"


def _corefile(kubeconfig: Path) -> str:
    # Names outside the cluster do not exist, at once: nothing here may ask the world.
    return f"""cluster.local:53 in-addr.arpa:53 ip6.arpa:53 {{
  errors
  health 127.0.0.1:8080
  ready 127.0.0.1:8181
  kubernetes cluster.local in-addr.arpa ip6.arpa {{
    kubeconfig {kubeconfig}
    pods insecure
  }}
  cache 5
}}
.:53 {{
  errors
  template ANY ANY . {{
    rcode NXDOMAIN
  }}
}}
"""


def addons() -> str:
    """The objects that make CoreDNS, which runs beside the API server, the cluster's DNS Service. As JSON."""
    name, namespace = "kube-dns", "kube-system"
    ports = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
    rbac = "rbac.authorization.k8s.io"
    items: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"clusterIP": DNS_SERVICE, "ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{name}-control",
                "namespace": namespace,
                "labels": {"kubernetes.io/service-name": name},
            },
            "addressType": "IPv6" if IPV6 else "IPv4",
            "endpoints": [{"addresses": [CONTROL.address]}],
            "ports": ports,
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "system:coredns"},
            "rules": [
                {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
                {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
            ],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "system:coredns"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "system:coredns"},
            "subjects": [{"apiGroup": rbac, "kind": "User", "name": "system:coredns"}],
        },
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
