"""The cluster's own network: a namespace for the control plane, one a node, and a bridge that joins them.

Nothing here has a way out of the machine, and the machine's own namespace is untouched. Addresses: nodes in
10.123.0.0/24, pods in 10.244.N.0/24, Services in 10.96.0.0/16. All traffic of pods is routed, none bridged, so
that Services work without the kernel's bridge filter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.commands import run
from tests.cluster.paths import state_folder

SERVICE_RANGE = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
POD_RANGE = "10.244.0.0/16"
BRIDGE = "cluster0"


@dataclass(frozen=True)
class Host:
    """One network namespace with an address on the cluster's bridge; `pods` is empty for the control plane."""

    name: str
    address: str
    pods: str = ""

    @property
    def namespace(self) -> Path:
        """The file that keeps the namespace, for nsenter --net."""
        return state_folder() / "netns" / self.name

    def command(self, *argv: str) -> str:
        """Run a command inside the namespace and return its stdout."""
        return run(["nsenter", f"--net={self.namespace}", "--", *argv])


CONTROL = Host("control", "10.123.0.1")
NODES = (Host("node1", "10.123.0.11", "10.244.1.0/24"), Host("node2", "10.123.0.12", "10.244.2.0/24"))


def make_network(nodes: Sequence[Host] = NODES) -> None:
    """Make the namespaces, the bridge, the links and the routes between `nodes` and the control plane."""
    hosts = (CONTROL, *nodes)
    for host in hosts:
        _make_namespace(host)
    CONTROL.command("ip", "link", "add", BRIDGE, "type", "bridge")
    CONTROL.command("ip", "address", "add", f"{CONTROL.address}/24", "dev", BRIDGE)
    CONTROL.command("ip", "link", "set", BRIDGE, "up")
    for node in nodes:
        peer = ["peer", "name", "eth0", "netns", str(node.namespace)]
        CONTROL.command("ip", "link", "add", node.name, "type", "veth", *peer)
        CONTROL.command("ip", "link", "set", node.name, "master", BRIDGE, "up")
        node.command("ip", "address", "add", f"{node.address}/24", "dev", "eth0")
        node.command("ip", "link", "set", "eth0", "up")
        node.command("ip", "route", "add", "default", "via", CONTROL.address)
    for host in hosts:
        for other in nodes:
            if other != host:
                host.command("ip", "route", "add", other.pods, "via", other.address)


def _make_namespace(host: Host) -> None:
    host.namespace.parent.mkdir(parents=True, exist_ok=True)
    host.namespace.touch()
    fix = "The kernel may limit network namespaces: see /proc/sys/user/max_net_namespaces."
    run(["unshare", f"--net={host.namespace}", "true"], fix=fix)
    host.command("ip", "link", "set", "lo", "up")
    host.command("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
