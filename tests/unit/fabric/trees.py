"""Build directory trees that look like the /sys, /proc and /dev of a machine with GPUs and HCAs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from transfer_queue.fabric.model import Distance

DATA = Path(__file__).parents[2] / "data" / "fabrics"
UNUSED_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def gids(layer: str, number: int, *, ipv4: bool = True) -> list[tuple[str, str]]:
    """(address, type) entries as a live port of this layer has them."""
    local = f"fe80:0000:0000:0000:0200:5eff:fe00:{number:04x}"
    if layer != "Ethernet":
        return [(local, "IB/RoCE v1")]
    mapped = f"0000:0000:0000:0000:0000:ffff:c633:64{number:02x}"
    addresses = [local, mapped] if ipv4 else [local]
    return [(address, kind) for address in addresses for kind in ("IB/RoCE v1", "RoCE v2")]


@dataclass
class PortSpec:
    state: str = "4: ACTIVE"
    layer: str = "InfiniBand"
    rate: str = "200 Gb/sec (4X HDR)"
    gids: list[tuple[str, str]] | None = None  #: None: what a port in that state has


@dataclass
class Tree:
    """A machine under ``root``. Devices are added one by one; chains are PCI ancestors, host bridge first."""

    root: Path
    device_files: bool = True  #: write /dev/infiniband and the like
    counter: int = 0
    directories: dict[str, Path] = field(default_factory=dict)

    def put(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def link(self, path: str, target: Path) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to(os.path.relpath(target, file.parent))

    def pci(self, chain: Sequence[str], numa: int, vendor: int, device: int, kind: int) -> Path:
        """Write a PCI function and its bridges; returns its directory."""
        for depth in range(2, len(chain)):
            if chain[depth - 1] not in self.directories:
                self.pci(chain[:depth], numa, 0x1000, 0xC010, 0x060400)
        path = self.root / "sys/devices" / Path(*chain)
        self.directories[chain[-1]] = path
        prefix = str(path.relative_to(self.root))
        for name, value in (("vendor", vendor), ("device", device), ("class", kind)):
            self.put(f"{prefix}/{name}", f"0x{value:04x}")
        self.put(f"{prefix}/numa_node", str(numa))
        self.link(f"sys/bus/pci/devices/{chain[-1]}", path)
        if numa >= 0:
            (self.root / f"sys/devices/system/node/node{numa}").mkdir(parents=True, exist_ok=True)
        return path

    def gpu(self, chain: Sequence[str], numa: int = 0, *, minor: int | None = None, driver: bool = True) -> None:
        self.pci(chain, numa, 0x10DE, 0x2330, 0x030200)
        number = self.count() if minor is None else minor
        if driver:
            facts = f"Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-{number:08x}-0000\nDevice Minor: \t {number}"
            self.put(f"proc/driver/nvidia/gpus/{chain[-1]}/information", facts)

    def hca(
        self,
        name: str,
        chain: Sequence[str] | None,
        numa: int = 0,
        *,
        ports: Sequence[PortSpec] = (PortSpec(),),
        device_id: int = 0x1021,
        vendor: int = 0x15B3,
        physfn: Path | None = None,
        bond: str | None = None,
        up: Sequence[bool] = (True, True),
        device_file: bool = True,
        uverbs: bool = True,
    ) -> Path | None:
        """Write an HCA. ``chain`` None: no PCI device behind it (soft-RoCE)."""
        number = self.count()
        device = None if chain is None else self.pci(chain, numa, vendor, device_id, 0x020700)
        home = (device or self.root / "sys/devices/virtual") / "infiniband" / name
        prefix = str(home.relative_to(self.root))
        self.put(f"{prefix}/node_guid", f"0200:5eff:fe00:{number:04x}")
        netdev = f"net{number}"
        for index, spec in enumerate(ports, 1):
            self._port(f"{prefix}/ports/{index}", spec, number, netdev)
        self.link(f"sys/class/infiniband/{name}", home)
        if uverbs:
            self.put(f"sys/class/infiniband_verbs/uverbs{number}/ibdev", name)
            if self.device_files and device_file:
                self.put(f"dev/infiniband/uverbs{number}", "")
        if self.device_files:
            (self.root / "dev").mkdir(exist_ok=True)
        if device is not None:
            self.link(f"{prefix}/device", device)
            self._netdevs(device, netdev, bond, up)
            if physfn is not None:
                self.link(str((device / "physfn").relative_to(self.root)), physfn)
        return device

    def _port(self, prefix: str, spec: PortSpec, number: int, netdev: str) -> None:
        self.put(f"{prefix}/state", spec.state)
        self.put(f"{prefix}/link_layer", spec.layer)
        self.put(f"{prefix}/rate", spec.rate)
        live = spec.state.endswith(" ACTIVE")
        table = spec.gids if spec.gids is not None else gids(spec.layer, number) if live else []
        for index in range(max(8, len(table))):
            self.put(f"{prefix}/gids/{index}", table[index][0] if index < len(table) else UNUSED_GID)
            if index < len(table):
                self.put(f"{prefix}/gid_attrs/types/{index}", table[index][1])
                self.put(f"{prefix}/gid_attrs/ndevs/{index}", netdev)
            else:  # the kernel answers EINVAL; a directory refuses to be read, too
                (self.root / f"{prefix}/gid_attrs/types/{index}").mkdir(parents=True)

    def _netdevs(self, device: Path, netdev: str, bond: str | None, up: Sequence[bool]) -> None:
        slaves = [netdev] if bond is None else [f"{netdev}p{index}" for index in range(len(up))]
        for slave, alive in zip(slaves, up, strict=False):
            home = str((device / "net" / slave).relative_to(self.root))
            self.put(f"{home}/operstate", "up" if alive else "down")
            self.link(f"sys/class/net/{slave}", self.root / home)
            if bond is not None:
                self.link(f"{home}/master", self.root / f"sys/class/net/{bond}")
        if bond is not None:
            self.put(f"sys/class/net/{bond}/bonding/slaves", " ".join(slaves))
            for slave in slaves:
                self.link(f"sys/class/net/{bond}/lower_{slave}", self.root / f"sys/class/net/{slave}")

    def default_route(self, netdev: str) -> None:
        header = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"
        self.put("proc/net/route", f"{header}\n{netdev}\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0")

    def count(self) -> int:
        self.counter += 1
        return self.counter - 1


def facts_of(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return facts


def recorded(facts: dict[str, Any]) -> dict[tuple[str, str], Distance]:
    """The recorded matrix: (GPU name, NIC name) -> distance."""
    names = [nic["name"] for nic in facts["nics"]]
    return {
        (gpu, nic): Distance[word]
        for gpu, row in facts["matrix"].items()
        for nic, word in zip(names, row.split(), strict=True)
    }


def build(facts: dict[str, Any], root: Path, *, reported_numa: bool = False, own_domains: bool = False) -> Tree:
    """Write the recorded machine.

    NUMA numbers follow from the matrix unless ``reported_numa``. With ``own_domains`` every device sits alone in a PCI
    domain, at its recorded address, as in a virtual machine that hides the switches.
    """
    tree = Tree(root)
    gpu_bdf = facts.get("gpu_bdf", {})
    nic_bdf = {nic["name"]: nic.get("bdf") for nic in facts["nics"]}
    chains: dict[str, tuple[str, ...]]
    if own_domains:
        addresses = {**gpu_bdf, **nic_bdf}
        chains = {name: (f"pci{address[:7]}", address) for name, address in addresses.items()}
        numa = dict.fromkeys(chains, -1)
    else:
        chains, numa = lay_out(facts, reported_numa)
    for gpu in facts["gpus"]:
        tree.gpu(chains[gpu], numa[gpu])
    assumed = facts.get("assumed", {})
    specs = [{**nic, **assumed.get(nic["name"], {})} for nic in facts["nics"]]
    for spec in specs:
        if "vf_of" not in spec:
            _add(tree, spec, chains, numa)
    for spec in specs:
        if "vf_of" not in spec:
            continue
        card = chains[spec["vf_of"]]
        # The functions of a bonded card take turns; only the first has an HCA.
        function = card[-1].rpartition(".")[0] + f".{tree.counter % 2}"
        if function not in tree.directories:
            tree.pci((*card[:-1], function), numa[spec["vf_of"]], 0x15B3, 0x1021, 0x020000)
        _add(tree, spec, chains, numa, physfn=tree.directories[function])
    return tree


def _add(tree: Tree, spec: dict[str, Any], chains: Any, numa: Any, physfn: Path | None = None) -> None:
    name = spec["name"]
    layer = spec.get("link_layer", "InfiniBand")
    state = {"ACTIVE": "4: ACTIVE", "DOWN": "1: DOWN"}[spec.get("state", "ACTIVE")]
    tree.hca(
        name,
        chains[name],
        numa[name],
        ports=[PortSpec(state, layer, spec.get("rate", "200 Gb/sec (4X HDR)"))],
        device_id=0xA2DC if spec.get("dpu") else 0x101E if physfn else 0x1021,
        physfn=physfn,
        bond=f"bond{tree.counter}" if "bond" in name else None,
    )


def nccl_topology(facts: dict[str, Any], path: Path) -> Path:
    """The vendor's topology file for a machine whose record came from one: one switch per NUMA node."""
    system = ET.Element("system", version="1")
    numa = {**facts["numa"], **{nic["name"]: nic["numa"] for nic in facts["nics"]}}
    address = {**facts["gpu_bdf"], **{nic["name"]: nic["bdf"] for nic in facts["nics"]}}
    for node in sorted(set(numa.values())):
        cpu = ET.SubElement(system, "cpu", numaid=str(node))
        switch = ET.SubElement(cpu, "pci", busid=f"ffff:ff:{node + 1:02x}.0")
        for name in numa:
            if numa[name] == node:
                ET.SubElement(switch, "pci", busid=address[name].upper())
    ET.ElementTree(system).write(path)
    return path


def lay_out(facts: dict[str, Any], reported_numa: bool) -> tuple[dict[str, tuple[str, ...]], dict[str, int]]:
    """A PCI path and a NUMA node for every device, such that the distances come out as recorded."""
    distance = recorded(facts)
    devices = [*facts["gpus"], *(nic["name"] for nic in facts["nics"])]

    def split(group: list[str], level: Distance) -> list[list[str]]:
        return _components(group, lambda a, b: distance.get((a, b), distance.get((b, a), Distance.SYS)) <= level)

    chains: dict[str, tuple[str, ...]] = {}
    numa: dict[str, int] = {}
    told: dict[str, int] = {**facts.get("numa", {}), **{n["name"]: n["numa"] for n in facts["nics"] if "numa" in n}}
    fresh = iter(range(16, 1000))
    taken: dict[int, set[bool]] = {}
    buses = _buses()
    for node in split(devices, Distance.NODE):
        kinds = {device in facts["gpus"] for device in node}
        number = next((told[device] for device in node if device in told), next(fresh))
        if not reported_numa and len(taken.get(number, set()) | kinds) > 1 and number in taken:
            number = next(fresh)  # sharing it would bring a GPU and a NIC nearer than recorded
        taken.setdefault(number, set()).update(kinds)
        for host in split(node, Distance.PHB):
            domain, bus = next(buses)
            bridge = f"pci{domain:04x}:{bus:02x}"
            for slot, port in enumerate(split(host, Distance.PXB), 1):
                _below_port((bridge, f"{domain:04x}:{bus:02x}:{slot:02x}.0"), split(port, Distance.PIX), buses, chains)
            numa.update(dict.fromkeys(host, number))
    return chains, numa


def _below_port(
    port: tuple[str, ...],
    switches: list[list[str]],
    buses: Iterator[tuple[int, int]],
    chains: dict[str, tuple[str, ...]],
) -> None:
    """Place the devices below one root port: directly, behind one switch, or behind switches below a switch."""
    domain = int(port[1].partition(":")[0], 16)

    def address(device: int = 0, bus: int | None = None) -> str:
        return f"{domain:04x}:{next(buses)[1] if bus is None else bus:02x}:{device:02x}.0"

    if len(switches) == 1 and len(switches[0]) == 1:
        chains[switches[0][0]] = (*port, address())
        return
    top = (*port, address())
    top_bus = next(buses)[1]
    for position, devices in enumerate(switches):
        upper, bus = top, top_bus
        if len(switches) > 1:
            upper, bus = (*top, address(position, top_bus), address()), next(buses)[1]
        for slot, device in enumerate(devices):
            chains[device] = (*upper, address(slot, bus), address())


def _buses() -> Iterator[tuple[int, int]]:
    """(domain, bus) pairs. One domain is enough for every recorded machine."""
    yield from ((0, bus) for bus in range(256))


def _components(group: list[str], joined: Callable[[str, str], bool]) -> list[list[str]]:
    left = list(group)
    components = []
    while left:
        component = [left.pop(0)]
        for member in component:
            near = [device for device in left if joined(member, device)]
            component += near
            left = [device for device in left if device not in near]
        components.append(sorted(component, key=group.index))
    return components
