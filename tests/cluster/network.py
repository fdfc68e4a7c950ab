"""The cluster's own network: a namespace for the control plane, one a node, and a bridge that joins them.

Nothing here has a way out of the machine, and the machine's own namespace is untouched. Addresses: nodes in
10.123.0.0/24, pods in 10.244.N.0/24, Services in 10.96.0.0/16; with TQ_CLUSTER_IP=6 all of them IPv6, in
fd10:123::/64, fd10:244:N::/64 and fd10:96::/112. All traffic of pods is routed, none bridged, so that Services work
without the kernel's bridge filter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.commands import run
from tests.cluster.paths import state_folder

IPV6 = os.environ.get("TQ_CLUSTER_IP", "4") == "6"
SERVICE_RANGE, API_SERVICE, DNS_SERVICE, POD_RANGE = (
    ("fd10:96::/112", "fd10:96::1", "fd10:96::a", "fd10:244::/32")
    if IPV6
    else ("10.96.0.0/16", "10.96.0.1", "10.96.0.10", "10.244.0.0/16")
)
ANY = "::" if IPV6 else "0.0.0.0"
"""What programs listen on."""
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


if IPV6:
    CONTROL = Host("control", "fd10:123::1")
    NODES = (Host("node1", "fd10:123::11", "fd10:244:1::/64"), Host("node2", "fd10:123::12", "fd10:244:2::/64"))
else:
    CONTROL = Host("control", "10.123.0.1")
    NODES = (Host("node1", "10.123.0.11", "10.244.1.0/24"), Host("node2", "10.123.0.12", "10.244.2.0/24"))


def in_url(address: str) -> str:
    """An address as the host of a URL."""
    return f"[{address}]" if ":" in address else address


def make_network(nodes: Sequence[Host] = NODES) -> None:
    """Make the namespaces, the bridge, the links and the routes between `nodes` and the control plane."""
    hosts = (CONTROL, *nodes)
    for host in hosts:
        _make_namespace(host)
    CONTROL.command("ip", "link", "add", BRIDGE, "type", "bridge")
    # The kernel does not look for others with an address before it uses it: there are none.
    length, own = (64, ["nodad"]) if IPV6 else (24, [])
    CONTROL.command("ip", "address", "add", f"{CONTROL.address}/{length}", "dev", BRIDGE, *own)
    CONTROL.command("ip", "link", "set", BRIDGE, "up")
    for node in nodes:
        peer = ["peer", "name", "eth0", "netns", str(node.namespace)]
        CONTROL.command("ip", "link", "add", node.name, "type", "veth", *peer)
        CONTROL.command("ip", "link", "set", node.name, "master", BRIDGE, "up")
        node.command("ip", "address", "add", f"{node.address}/{length}", "dev", "eth0", *own)
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
    forwards = "ipv6/conf/all/forwarding" if IPV6 else "ipv4/ip_forward"
    host.command("sh", "-c", f"echo 1 > /proc/sys/net/{forwards}")
