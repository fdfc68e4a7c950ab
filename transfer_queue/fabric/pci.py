"""Distances between PCI devices from their place in the device tree."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath

from transfer_queue.fabric.model import Distance, Gpu, Hca

__all__ = ["chain_of", "distances", "lone_domains", "walk"]

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


def chain_of(path: PurePath) -> tuple[str, ...]:
    """PCI ancestors in a resolved device path: host bridge, bridges, device; empty if the device is not on PCI.

    Parts below the last PCI function (sub-functions, network devices) belong to that function.
    """
    chain: list[str] = []
    for part in path.parts:
        if _HOST_BRIDGE.fullmatch(part):
            chain = [part]
        elif chain and _ADDRESS.fullmatch(part):
            chain.append(part)
        elif len(chain) > 1:
            break
    return tuple(chain) if len(chain) > 1 else ()


def walk(a: tuple[str, ...], b: tuple[str, ...], numa_a: int, numa_b: int) -> Distance:
    """Distance of two devices whose ancestors are both known.

    Below a common bridge, a switch adds two bridges to each path (its upstream port is shared, the downstream port
    is not), so at most a downstream port and the device remain on each side when only one switch lies between.
    """
    shared = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        shared += 1
    if shared >= 2:
        return Distance.PIX if max(len(a), len(b)) - shared <= 2 else Distance.PXB
    if shared == 1:
        return Distance.PHB
    return Distance.NODE if numa_a == numa_b and numa_a >= 0 else Distance.SYS


def lone_domains(gpus: Iterable[Gpu], hcas: Iterable[Hca]) -> frozenset[str]:
    """PCI domains that hold a single GPU or network card.

    Some hypervisors give every passed-through device a domain of its own. The tree then says nothing about the
    switches of the real machine, and neither do the NUMA numbers that come with it.
    """
    devices: list[Gpu | Hca] = [*gpus, *hcas]
    slots = {device.address.rpartition(".")[0] for device in devices if device.chain}
    return frozenset(domain for domain, count in Counter(s.partition(":")[0] for s in slots).items() if count == 1)


def distances(gpus: tuple[Gpu, ...], hcas: tuple[Hca, ...]) -> dict[tuple[str, str], Distance | None]:
    """Distance of every GPU to every HCA; None where a path is hidden or both sit alone in their PCI domains."""
    lone = lone_domains(gpus, hcas)
    result: dict[tuple[str, str], Distance | None] = {}
    for gpu in gpus:
        for hca in hcas:
            domains = {address.partition(":")[0] for address in (gpu.address, hca.address)}
            known = bool(gpu.chain and hca.chain) and not domains <= lone
            result[gpu.address, hca.name] = walk(gpu.chain, hca.chain, gpu.numa, hca.numa) if known else None
    return result
