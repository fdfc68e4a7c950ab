"""One node: containerd, kubelet and kube-proxy in namespaces of its own, like a machine of its own."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import cgroups
from tests.cluster.commands import run
from tests.cluster.component import Component, program, wait_until
from tests.cluster.control_plane import INTERNAL_SERVER
from tests.cluster.errors import ClusterError
from tests.cluster.host import CNI_FOLDER
from tests.cluster.network import ANY, DNS_SERVICE, POD_RANGE, Host
from tests.cluster.paths import SOURCE, state_folder
from tests.cluster.pki import Authority

START_SECONDS = 60.0
SOCKET = "/run/containerd/containerd.sock"
SANDBOX_IMAGE = "localhost/pause:1"


@dataclass(frozen=True)
class Node:
    """A node's programs, from the folder `binaries`, at `host`."""

    host: Host
    binaries: Path

    @property
    def name(self) -> str:
        """Its name in Kubernetes."""
        return self.host.name

    @property
    def folder(self) -> Path:
        """Its disk: containerd's, kubelet's and CNI's folders and its configuration."""
        return state_folder() / self.name

    @property
    def init(self) -> Component:
        """The process that keeps its namespaces; killing it is pulling the node's plug."""
        return Component(f"{self.name}-init", program("sleep"))

    @property
    def containerd(self) -> Component:
        """Its container runtime."""
        return Component(f"{self.name}-containerd", self.binaries / "containerd")

    @property
    def kubelet(self) -> Component:
        """Its kubelet."""
        return Component(f"{self.name}-kubelet", self.binaries / "kubelet")

    @property
    def proxy(self) -> Component:
        """Its kube-proxy."""
        return Component(f"{self.name}-kube-proxy", self.binaries / "kube-proxy")

    @property
    def components(self) -> tuple[Component, ...]:
        """All of them, in the order they start."""
        return (self.init, self.containerd, self.kubelet, self.proxy)

    def start_runtime(self) -> None:
        """Make the node's namespaces and start containerd in them."""
        cgroups.make_group(self.name)
        self.folder.mkdir(parents=True, exist_ok=True)
        private = ["--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--mount-proc"]
        unshare = ["unshare", *private, "--ipc", "--uts", "--"]
        shell = ["sh", str(SOURCE / "node_init.sh"), self.name, str(state_folder()), str(self.binaries)]
        enter = ["nsenter", f"--net={self.host.namespace}", "--", *unshare, *shell]
        ready = self.folder / "ready"
        self.init.start(["infinity"], enter=enter)
        # The shell says that it is ready, and then becomes the program that the namespaces are entered by.
        wait_until(
            lambda: ready.exists() and self.init.pid() is not None,
            f"the namespaces of {self.name} are ready",
            START_SECONDS,
            [self.init],
        )
        self._write_runtime_configuration()
        # The shim and runc are found beside containerd and in the system folders.
        path = f"{self.binaries}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.containerd.start(
            ["--config", self.folder / "containerd.toml"], enter=self._enter(), environment={"PATH": path}
        )
        wait_until(self._runtime_answers, f"containerd of {self.name} answers", START_SECONDS, [self.containerd])

    def start_kubelet(self, authority: Authority) -> None:
        """Start kubelet and kube-proxy; containerd must be up."""
        hosts = (self.host.address, "127.0.0.1")
        pair = authority.issue(self.name, f"system:node:{self.name}", group="system:nodes", hosts=hosts)
        kubeconfig = authority.kubeconfig(self.folder / "kubelet.kubeconfig", INTERNAL_SERVER, pair)
        configuration = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": ANY,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(authority.files.certificate)},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(pair.certificate),
            "tlsPrivateKeyFile": str(pair.key),
            "containerRuntimeEndpoint": f"unix://{SOCKET}",
            "clusterDNS": [DNS_SERVICE],
            "clusterDomain": "cluster.local",
            "resolvConf": "",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{cgroups.TOP}/{self.name}",
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            # The file system is the machine's: its fill is not the node's affair.
            "localStorageCapacityIsolation": False,
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
        }
        file = self.folder / "kubelet.json"
        file.write_text(json.dumps(configuration, indent=1))
        flags = [f"--config={file}", f"--kubeconfig={kubeconfig}", f"--hostname-override={self.name}"]
        self.kubelet.start([*flags, f"--node-ip={self.host.address}", "--v=2"], enter=self._enter())
        self._start_proxy(authority)

    def run(self, argv: Sequence[str | Path], stdin: str | Path | None = None) -> str:
        """Run a command on the node, with its mounts, processes and network, and return its stdout."""
        return run([*self._enter(), *argv], stdin=stdin)

    def images(self) -> dict[str, str]:
        """Digest of each image on the node by name, such as localhost/pause:1."""
        table = self.run([self.binaries / "ctr", "--namespace", "k8s.io", "images", "ls"])
        rows = [line.split() for line in table.splitlines()[1:]]
        return {row[0]: row[2] for row in rows if len(row) > 2}

    def load(self, archive: Path) -> None:
        """Import the images of an OCI archive."""
        # As stdin, because the node may not see the folder that the archive lies in.
        self.run([self.binaries / "ctr", "--namespace", "k8s.io", "images", "import", "-"], stdin=archive)

    def name_image(self, image: str, name: str) -> None:
        """Give an image that is on the node a further name."""
        self.run([self.binaries / "ctr", "--namespace", "k8s.io", "images", "tag", "--force", image, name])

    def _start_proxy(self, authority: Authority) -> None:
        pair = authority.issue(f"{self.name}-kube-proxy", "system:kube-proxy")
        flags = {
            "kubeconfig": authority.kubeconfig(self.folder / "kube-proxy.kubeconfig", INTERNAL_SERVER, pair),
            "bind-address": ANY,
            "cluster-cidr": POD_RANGE,
            "hostname-override": self.name,
            "proxy-mode": "nftables",
            "conntrack-max-per-core": 0,  # the limit is the machine's, not ours to set
        }
        self.proxy.start([f"--{name}={value}" for name, value in flags.items()], enter=self._enter())

    def _write_runtime_configuration(self) -> None:
        gateway = str(next(ipaddress.ip_network(self.host.pods).hosts()))
        ipam = {
            "type": "host-local",
            "ranges": [[{"subnet": self.host.pods, "gateway": gateway}]],
            "routes": [{"dst": f"{ANY}/0"}],
        }
        plugins = [
            {"type": "ptp", "ipMasq": False, "ipam": ipam},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ]
        (self.folder / "cni-conf").mkdir(exist_ok=True)
        network = {"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}
        (self.folder / "cni-conf" / "10-pods.conflist").write_text(json.dumps(network, indent=1))
        (self.folder / "containerd.toml").write_text(
            f"""version = 3
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{SANDBOX_IMAGE}"
[plugins.'io.containerd.cri.v1.runtime']
  # Lowering a process's out-of-memory score needs CAP_SYS_RESOURCE, which the machine may lack.
  restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
    SystemdCgroup = false
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ["{CNI_FOLDER}"]
  conf_dir = "{self.folder / "cni-conf"}"
"""
        )

    def _enter(self) -> Sequence[str]:
        pid = self.init.pid()
        if pid is None:
            raise ClusterError(f"{self.name} is not running. See: python -m tests.cluster status")
        return ["nsenter", f"--target={pid}", "--mount", "--pid", "--ipc", "--uts", "--net", "--"]

    def _runtime_answers(self) -> bool:
        try:
            self.run([self.binaries / "ctr", "version"])
        except ClusterError:
            return False
        return True
