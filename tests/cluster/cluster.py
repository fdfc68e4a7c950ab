"""The whole cluster: up, down, and what its users do with it."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import images
from tests.cluster.binaries import build_binaries
from tests.cluster.commands import run
from tests.cluster.component import Component, wait_until
from tests.cluster.console import say, step
from tests.cluster.control_plane import ControlPlane, addons, admin_kubeconfig
from tests.cluster.errors import ClusterError
from tests.cluster.host import CLUSTER_PROGRAMS, require_privileges, require_programs
from tests.cluster.leftovers import MARKER, find_leftovers, make_state_folder, remove_leftovers
from tests.cluster.lock import exclusive
from tests.cluster.network import CONTROL, NODES, make_network
from tests.cluster.node import SANDBOX_IMAGE, Node
from tests.cluster.oci import write_archive
from tests.cluster.paths import cache_folder, state_folder
from tests.cluster.pki import Authority

START_SECONDS = 120.0
NO_CLUSTER = "no cluster is up. Start one with: make cluster"


@dataclass(frozen=True)
class Cluster:
    """A cluster whose programs lie in the folder `binaries`."""

    binaries: Path

    @property
    def kubeconfig(self) -> Path:
        """Client configuration of its administrator, for clients on this machine."""
        return admin_kubeconfig()

    @property
    def control_plane(self) -> ControlPlane:
        """etcd, API server, controllers, scheduler and DNS."""
        return ControlPlane(self.binaries)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Its nodes, node1 first."""
        return tuple(Node(host, self.binaries) for host in NODES)

    @property
    def components(self) -> tuple[Component, ...]:
        """Every program it consists of."""
        return self.control_plane.components + tuple(each for node in self.nodes for each in node.components)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl as administrator and return its stdout. Raises ClusterError with its message."""
        return run([self.binaries / "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments], stdin=stdin)

    def helm(self, *arguments: str) -> str:
        """Run helm as administrator and return its stdout. Raises ClusterError with its message."""
        return run([self.binaries / "helm", f"--kubeconfig={self.kubeconfig}", *arguments])

    def load(self, image: str) -> list[str]:
        """Put `image` on every node and return the names under which pods can use it.

        `image` is a folder name of images/ (built first if its content changed), the path of an OCI archive, or
        the name of an image in buildah's storage.
        """
        return images.load_image(images.find_archive(image), self.nodes)

    def dead(self) -> list[Component]:
        """Its programs that do not run."""
        return [component for component in self.components if component.pid() is None]

    def healthy(self) -> bool:
        """Whether every program runs and every node is Ready."""
        return not self.dead() and self._nodes_ready()

    def start(self) -> None:
        """Start everything on a machine that has nothing of a cluster, and wait until pods can run."""
        make_state_folder()
        (state_folder() / "binaries").symlink_to(self.binaries)
        tools = state_folder() / "tools"
        tools.mkdir()
        for name in ("kubectl", "helm"):
            (tools / name).symlink_to(self.binaries / name)
        make_network()
        authority = Authority(state_folder() / "pki")
        with step("starting the control plane"):
            self.control_plane.start(authority)
            self.kubectl("apply", "-f", "-", stdin=addons())
        sandbox = state_folder() / "pause.tar"
        write_archive(sandbox, SANDBOX_IMAGE, {"/pause": self.binaries / "pause"}, ["/pause"])
        for node in self.nodes:
            with step(f"starting {node.name}"):
                node.start_runtime()
                node.load(sandbox)
                node.start_kubelet(authority)
        with step("waiting for the nodes and the DNS"):
            wait_until(self._nodes_ready, "both nodes are Ready", START_SECONDS, self.components)
            wait_until(self._accounts_ready, "service accounts exist", START_SECONDS, self.components)
            wait_until(self._dns_ready, "the cluster's DNS is ready", START_SECONDS, self.components)

    def _nodes_ready(self) -> bool:
        try:
            answer = json.loads(self.kubectl("get", "nodes", "-o", "json", "--request-timeout=5s"))
        except ClusterError:
            return False
        ready = {
            node["metadata"]["name"]
            for node in answer["items"]
            for condition in node["status"].get("conditions", [])
            if condition["type"] == "Ready" and condition["status"] == "True"
        }
        return ready >= {node.name for node in self.nodes}

    def _accounts_ready(self) -> bool:
        found = self.kubectl("get", "serviceaccount", "default", "--ignore-not-found", "-o", "name")
        return bool(found.strip())

    def _dns_ready(self) -> bool:
        ask = "import urllib.request as u; u.urlopen('http://127.0.0.1:8181/ready', timeout=2)"
        try:
            CONTROL.command(sys.executable, "-I", "-c", ask)
        except ClusterError:
            return False
        return True


def running_cluster() -> Cluster | None:
    """The cluster that is on this machine, healthy or not; None when there is none."""
    link = state_folder() / "binaries"
    return Cluster(link.resolve()) if link.is_symlink() else None


def require_cluster() -> Cluster:
    """The cluster that is on this machine. Raises ClusterError when there is none."""
    cluster = running_cluster()
    if cluster is None or not cluster.kubeconfig.exists():
        raise ClusterError(NO_CLUSTER)
    return cluster


def up() -> Cluster:
    """Bring a cluster up, building what it needs first; a healthy one is left as it is.

    Remains of an earlier one are removed first, and a start that fails leaves nothing behind but its logs.
    """
    require_privileges()
    require_programs(CLUSTER_PROGRAMS)
    cluster = Cluster(build_binaries())
    with exclusive():
        if running_cluster() == cluster and cluster.healthy():
            say("the cluster is up already")
            return cluster
        remains = find_leftovers()
        if remains:
            with step(f"removing the remains of an earlier cluster ({_count(remains.processes)})"):
                remove_leftovers()
        try:
            cluster.start()
        except BaseException:
            kept = _keep_logs()
            with step("the start failed; removing what it left"):
                remove_leftovers()
            say(f"its logs are kept in {kept}")
            raise
    say('the cluster is up; reach it with: eval "$(make -s cluster-env)"')
    return cluster


def down() -> None:
    """Remove the cluster and all that an earlier one may have left."""
    require_privileges()
    with exclusive():
        if not find_leftovers():
            say("no cluster is up and nothing is left of one")
            return
        with step("removing the cluster"):
            remove_leftovers()
            remains = find_leftovers()
        if remains:
            raise ClusterError(f"still there after removal: {remains}. Run down again.")


def environment() -> str:
    """Shell commands that point kubectl, helm and python's kubernetes client at the cluster."""
    cluster = require_cluster()
    folders = [state_folder() / "tools", Path(sys.executable).parent]
    path = ":".join(shlex.quote(str(folder)) for folder in folders)
    return f'export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))}\nexport PATH={path}:"$PATH"'


def status() -> tuple[str, bool]:
    """A table of the cluster's programs and nodes, and whether all is well."""
    cluster = running_cluster()
    if cluster is None:
        remains = find_leftovers()
        return (f"{NO_CLUSTER}\nleft of an earlier one: {remains}" if remains else NO_CLUSTER), False
    rows = [_row(component) for component in cluster.components]
    healthy = cluster.healthy()
    if healthy:
        rows += ["", cluster.kubectl("get", "nodes", "-o", "wide").rstrip()]
    dead = ", ".join(component.name for component in cluster.dead())
    verdict = "all is well" if healthy else f"not running: {dead}" if dead else "the API server or a node is not ready"
    return "\n".join([*rows, "", verdict]), healthy


def _row(component: Component) -> str:
    pid = component.pid()
    return f"{component.name:28}{'running as ' + str(pid) if pid else 'NOT RUNNING':22}{component.log}"


def _count(processes: Sequence[int]) -> str:
    return f"{len(processes)} processes" if processes else "no process"


def _keep_logs() -> Path:
    """Copy the logs of a failed start to where they outlive it."""
    kept = cache_folder() / "failed-start"
    if (kept / MARKER).exists():
        shutil.rmtree(kept)
    source = state_folder() / "log"
    if source.exists():
        kept.mkdir(parents=True, exist_ok=True)
        (kept / MARKER).touch()
        shutil.copytree(source, kept, dirs_exist_ok=True)
    return kept
