"""What a machine's RDMA fabric looks like to one container: GPUs, HCAs, their ports and the distances between them.

Everything here is plain data without behaviour that touches the machine. An HCA (host channel adapter) is a device
under ``/sys/class/infiniband``, be it InfiniBand or RoCE. Rates are in Gb/s, PCI addresses are spelled
``0000:3b:00.0``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

__all__ = ["Distance", "Fabric", "Gid", "Gpu", "Hca", "Port", "natural_key"]

_IPV4_MAPPED = "0000:0000:0000:0000:0000:ffff:"
_LINK_LOCAL = "fe80:"


class Distance(IntEnum):
    """How far two PCI devices are apart, in the words of ``nvidia-smi topo``; smaller is nearer."""

    PIX = 0  #: one PCIe switch between them
    PXB = 1  #: several PCIe switches, but below one root port
    PHB = 2  #: one PCIe host bridge (through the CPU)
    NODE = 3  #: different host bridges of one NUMA node
    SYS = 4  #: different NUMA nodes


@dataclass(frozen=True)
class Gid:
    """One used entry of a port's GID table."""

    index: int
    address: str  #: eight groups of four hexadecimal digits
    kind: str  #: ``IB/RoCE v1``, ``RoCE v2`` or empty where the kernel does not tell
    netdev: str | None = None  #: network device that carries it, None where hidden (another network namespace)

    @property
    def ipv4(self) -> bool:
        return self.address.startswith(_IPV4_MAPPED)

    @property
    def roce_v2(self) -> bool:
        return self.kind == "RoCE v2"

    @property
    def link_local(self) -> bool:
        return self.address.startswith(_LINK_LOCAL)


@dataclass(frozen=True)
class Port:
    """One port of an HCA as the kernel reports it."""

    number: int
    state: str  #: ``ACTIVE``, ``DOWN``, ``INIT``, ``ARMED`` ... or empty
    link_layer: str  #: ``InfiniBand``, ``Ethernet`` or anything else (unusable)
    rate: float  #: Gb/s, 0 where unknown
    gids: tuple[Gid, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU of the machine."""

    ordinal: int  #: position in PCI address order over the whole machine
    address: str
    chain: tuple[str, ...] = ()  #: PCI ancestors, host bridge first, own address last; empty where hidden
    numa: int = -1
    model: str = ""
    uuid: str = ""
    in_container: bool = True  #: given to this container
    index: int | None = None  #: CUDA index in this process, None if the process does not see it

    @property
    def name(self) -> str:
        return f"GPU{self.ordinal}"


@dataclass(frozen=True)
class Hca:
    """One RDMA device."""

    name: str
    ports: tuple[Port, ...] = ()
    address: str = ""  #: PCI address, empty where hidden (soft-RoCE, masked sysfs)
    chain: tuple[str, ...] = ()
    numa: int = -1
    guid: str = ""
    vendor: int = 0
    device: int = 0
    uverbs: str | None = None  #: e.g. ``uverbs0``
    node: str = "unknown"  #: /dev/infiniband/uverbsN is ``ok``, ``missing``, ``denied`` or ``unknown``
    netdevs: tuple[str, ...] = ()
    physfn: str | None = None  #: PCI address of the physical function, for a virtual function
    links: tuple[tuple[str, bool], ...] = ()  #: members of the bond it belongs to and whether each is up
    default_route: bool = False  #: one of its network devices carries the default route

    @property
    def slot(self) -> str:
        """PCI address without the function number; ports of one card share it."""
        return self.address.rpartition(".")[0]

    @property
    def place(self) -> tuple[object, ...]:
        """Order by position in the machine. Names come last: they are labels and may be swapped at will."""
        return (self.address == "", self.address, self.guid, natural_key(self.name))


@dataclass(frozen=True)
class Fabric:
    """All that is known about the RDMA devices of one machine, seen from one container."""

    gpus: tuple[Gpu, ...] = ()
    hcas: tuple[Hca, ...] = ()
    distances: Mapping[tuple[str, str], Distance | None] = field(default_factory=dict)  #: (GPU address, HCA name)
    numa_nodes: tuple[int, ...] = ()
    source: str = "sysfs"  #: where the distances come from
    notes: tuple[str, ...] = ()

    def distance(self, gpu: Gpu, hca: Hca) -> Distance | None:
        """The distance, or None where nothing tells."""
        return self.distances.get((gpu.address, hca.name))

    def hca(self, name: str) -> Hca | None:
        return next((hca for hca in self.hcas if hca.name == name), None)


def natural_key(text: str) -> tuple[tuple[int, str], ...]:
    """Sort key under which mlx5_2 comes before mlx5_10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text))
