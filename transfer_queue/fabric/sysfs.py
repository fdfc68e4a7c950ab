"""Read a fabric from a directory tree: ``/`` of a machine or container, or a recording of one.

Used below the root: ``sys/class/infiniband``, ``sys/class/infiniband_verbs``, ``sys/class/net``, ``sys/bus/pci``,
``sys/devices``, ``dev/infiniband``, ``proc/driver/nvidia/gpus`` and ``proc/net/route``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from transfer_queue.fabric.files import list_directory, read_all, read_int, read_text
from transfer_queue.fabric.gpus import read_gpus
from transfer_queue.fabric.model import Distance, Fabric, Gid, Gpu, Hca, Port
from transfer_queue.fabric.pci import chain_of, distances
from transfer_queue.fabric.topology import TopologyFile

__all__ = ["read_fabric", "read_traffic"]


def read_fabric(
    root: str | Path = "/",
    environment: Mapping[str, str] | None = None,
    topology: TopologyFile | None = None,
) -> Fabric:
    """Read GPUs, HCAs and their distances.

    ``environment`` holds CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES of the process in question. ``topology``
    overrides the tree for the pairs of devices it knows. Whatever cannot be read is left out; nothing is raised.
    """
    base = Path(root)
    gpus, notes = read_gpus(base, environment or {})
    hcas = tuple(_read_hca(base, name) for name in list_directory(base / "sys/class/infiniband"))
    hcas = _mark_default_route(base, hcas)
    known = distances(gpus, hcas)
    source = "sysfs"
    if topology is not None:
        gpus, hcas, known, source = _overlay(topology, gpus, hcas, known)
    nodes = [name[4:] for name in list_directory(base / "sys/devices/system/node") if name.startswith("node")]
    return Fabric(
        gpus=gpus,
        hcas=hcas,
        distances=known,
        numa_nodes=tuple(int(node) for node in nodes if node.isdigit()),
        source=source,
        notes=notes,
    )


def read_traffic(root: str | Path, names: list[str]) -> dict[str, int]:
    """Units moved in both directions per HCA since boot: bytes, or packets for soft-RoCE.

    Only good for telling whether traffic rises. An HCA without counters is left out.
    """
    moved: dict[str, int] = {}
    for name in names:
        device = Path(root) / "sys/class/infiniband" / name / "ports"
        for port in list_directory(device):
            for directory, files, unit in (
                ("counters", ("port_xmit_data", "port_rcv_data"), 4),  # counted in words of 4 bytes
                ("hw_counters", ("sent_pkts", "rcvd_pkts"), 1),
            ):
                values = [read_int(device / port / directory / file, -1) for file in files]
                if min(values) >= 0:
                    moved[name] = moved.get(name, 0) + unit * sum(values)
                    break
    return moved


def _overlay(
    topology: TopologyFile,
    gpus: tuple[Gpu, ...],
    hcas: tuple[Hca, ...],
    known: Mapping[tuple[str, str], Distance | None],
) -> tuple[tuple[Gpu, ...], tuple[Hca, ...], dict[tuple[str, str], Distance | None], str]:
    """Distances and NUMA nodes with the topology file's word over the tree's."""
    merged = dict(known)
    for gpu in gpus:
        for hca in hcas:
            distance = topology.distance(gpu.address, hca.address)
            if distance is not None:
                merged[gpu.address, hca.name] = distance

    def numa(device: Gpu | Hca) -> int:
        told = topology.numa(device.address)
        return device.numa if told is None else told

    return (
        tuple(replace(gpu, numa=numa(gpu)) for gpu in gpus),
        tuple(replace(hca, numa=numa(hca)) for hca in hcas),
        merged,
        f"topology file {topology.path}",
    )


def _read_hca(root: Path, name: str) -> Hca:
    entry = root / "sys/class/infiniband" / name
    device = entry / "device"
    chain = chain_of(Path(os.path.realpath(device)))
    ports = tuple(_read_port(entry / "ports" / number, int(number)) for number in list_directory(entry / "ports"))
    netdevs = dict.fromkeys(list_directory(device / "net"))
    netdevs.update(dict.fromkeys(gid.netdev for port in ports for gid in port.gids if gid.netdev))
    physfn = Path(os.path.realpath(device / "physfn")).name if (device / "physfn").is_symlink() else None
    uverbs = _find_uverbs(root, name)
    return Hca(
        name=name,
        ports=ports,
        address=chain[-1] if chain else "",
        chain=chain,
        numa=read_int(device / "numa_node", -1),
        guid=read_text(entry / "node_guid") or "",
        vendor=read_int(device / "vendor", 0),
        device=read_int(device / "device", 0),
        uverbs=uverbs,
        node=_node_state(root, uverbs),
        netdevs=tuple(netdevs),
        physfn=physfn,
        links=_read_links(root, list(netdevs)),
    )


def _read_port(path: Path, number: int) -> Port:
    gids = []
    table = read_all(path / "gids")  # of 256 entries or 1024, nearly all unused
    for entry in sorted((entry for entry, address in table.items() if address.strip("0:")), key=int):
        address = table[entry]
        kind = read_text(path / "gid_attrs/types" / entry) or ""
        gids.append(Gid(int(entry), address, kind, read_text(path / "gid_attrs/ndevs" / entry) or None))
    rate = (read_text(path / "rate") or "").partition(" ")[0]
    return Port(
        number=number,
        state=(read_text(path / "state") or "").partition(": ")[2],
        link_layer=read_text(path / "link_layer") or "",
        rate=float(rate) if rate.replace(".", "", 1).isdigit() else 0.0,
        gids=tuple(gids),
    )


def _find_uverbs(root: Path, name: str) -> str | None:
    directory = root / "sys/class/infiniband_verbs"
    return next((entry for entry in list_directory(directory) if read_text(directory / entry / "ibdev") == name), None)


def _node_state(root: Path, uverbs: str | None) -> str:
    """Whether the device file is there. A recording without any /dev cannot tell."""
    if uverbs is None or not (root / "dev").is_dir():
        return "unknown"
    path = root / "dev/infiniband" / uverbs
    if not path.exists():
        return "missing"
    return "ok" if os.access(path, os.R_OK | os.W_OK) else "denied"


def _read_links(root: Path, netdevs: list[str]) -> tuple[tuple[str, bool], ...]:
    """Members of the bond above the network devices."""
    net = root / "sys/class/net"
    for netdev in netdevs:
        bond = netdev if (net / netdev / "bonding").is_dir() else Path(os.path.realpath(net / netdev / "master")).name
        slaves = (read_text(net / bond / "bonding/slaves") or "").split()
        if slaves:
            return tuple((slave, read_text(net / slave / "operstate") == "up") for slave in slaves)
    return ()


def _mark_default_route(root: Path, hcas: tuple[Hca, ...]) -> tuple[Hca, ...]:
    """Mark the HCAs that carry the default route, also below bonds, VLANs and bridges."""
    pending = []
    for line in (read_text(root / "proc/net/route") or "").splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[1] == "00000000" and words[7] == "00000000":
            pending.append(words[0])
    carriers: set[str] = set()
    while pending:
        netdev = pending.pop()
        if netdev not in carriers:
            carriers.add(netdev)
            lower = root / "sys/class/net" / netdev
            pending += [entry[6:] for entry in list_directory(lower) if entry.startswith("lower_")]
            pending += (read_text(lower / "bonding/slaves") or "").split()
    return tuple(replace(hca, default_route=not carriers.isdisjoint(hca.netdevs)) for hca in hcas)
