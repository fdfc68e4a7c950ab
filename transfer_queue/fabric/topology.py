"""Distances from a topology file in NCCL's XML format (``NCCL_TOPO_FILE``).

Cloud vendors ship such files for machines whose PCI tree is hidden from the guest. Format: a ``system`` of ``cpu``
elements, each with nested ``pci`` elements; a ``pci`` element of class 0x0604 stands for a whole switch. Source: NCCL
user guide, and the files in the Azure HPC image repository.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

from transfer_queue.errors import ConfigError
from transfer_queue.fabric.model import Distance

__all__ = ["TopologyFile", "read_topology"]

_MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class TopologyFile:
    """Place of every PCI device in the file: the cpu element's number, its NUMA node, the switches above the device."""

    path: str
    places: dict[str, tuple[int, int, tuple[str, ...]]]

    def distance(self, a: str, b: str) -> Distance | None:
        """Distance of two PCI addresses, None if the file lacks one of them."""
        if a not in self.places or b not in self.places:
            return None
        (cpu_a, numa_a, above_a), (cpu_b, numa_b, above_b) = self.places[a], self.places[b]
        if cpu_a != cpu_b:
            return Distance.NODE if numa_a == numa_b and numa_a >= 0 else Distance.SYS
        if above_a and above_b and above_a[0] == above_b[0]:
            return Distance.PIX if above_a == above_b else Distance.PXB
        return Distance.PHB

    def numa(self, address: str) -> int | None:
        return self.places[address][1] if address in self.places else None


def read_topology(path: str | Path) -> TopologyFile:
    """Read the file. Raises ConfigError if it is missing, too large, no XML, or names no PCI device."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"topology file {path} cannot be read ({error.strerror}): mount it into the container or unset "
            "NCCL_TOPO_FILE"
        ) from error
    if len(text) > _MAX_BYTES or b"<!" in text.replace(b"<!--", b""):
        # Entity declarations can blow up a parser; topology files have none.
        raise ConfigError(f"topology file {path} is larger than 4 MiB or holds declarations: give NCCL's plain XML")
    try:
        root = ET.fromstring(text)
    except ET.ParseError as error:
        raise ConfigError(
            f"topology file {path} is not XML ({error}): give the file of the machine's vendor"
        ) from error
    places: dict[str, tuple[int, int, tuple[str, ...]]] = {}
    for number, cpu in enumerate(root.iter("cpu")):
        numa = _number(cpu.get("numaid"))
        pending: list[tuple[ET.Element, tuple[str, ...]]] = [(cpu, ())]
        while pending:
            element, above = pending.pop()
            for child in element.findall("pci"):
                address = child.get("busid", "").lower()
                places[address] = (number, numa, above)
                pending.append((child, (*above, address)))
    if not places:
        raise ConfigError(f"topology file {path} names no PCI device: give the file of the machine's vendor")
    return TopologyFile(str(path), places)


def _number(text: str | None) -> int:
    try:
        return int(text or "-1")
    except ValueError:
        return -1
