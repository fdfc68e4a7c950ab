"""Which HCAs may carry queue traffic at all. Distance comes later: a near NIC that is down or slow is still wrong.

Two kinds of rules. *Unusable*: the device cannot work (port down, no GID, no device file ...). *Unsuitable*: it works
but belongs to another network (management, storage, host traffic). Rules of the second kind guess; a list of names
given by the user switches them off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from transfer_queue.fabric.model import Distance, Fabric, Hca, Port

__all__ = ["Exclusion", "Selectors", "sift", "usable_port"]

_MELLANOX = 0x15B3
_BLUEFIELD = frozenset({0xA2D2, 0xA2D6, 0xA2DC, 0xA2DF})


@dataclass(frozen=True)
class Exclusion:
    """An HCA that is not used, the rule that says so, and the reason in words."""

    hca: str
    rule: str
    reason: str


@dataclass(frozen=True)
class Selectors:
    """Names the user gave, shell patterns allowed. A non-empty ``include`` admits nothing else."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


_Verdict = tuple[str, str] | None  # rule, reason


def sift(fabric: Fabric, selectors: Selectors) -> tuple[tuple[Hca, ...], tuple[Exclusion, ...]]:
    """HCAs to use, by their place in the machine, and all others with the reason. No unsuitable rule empties it."""
    keep: list[Hca] = []
    out: list[Exclusion] = []
    for hca in sorted(fabric.hcas, key=lambda hca: hca.place):
        verdict = _selected(hca, selectors) or _unusable(hca)
        if verdict is None:
            keep.append(hca)
        else:
            out.append(Exclusion(hca.name, *verdict))
    if not selectors.include:
        for rule in _UNSUITABLE:
            verdicts = rule(keep, fabric)
            out += [Exclusion(hca.name, *verdicts[hca.name]) for hca in keep if hca.name in verdicts]
            keep = [hca for hca in keep if hca.name not in verdicts]
    return tuple(keep), tuple(out)


def usable_port(hca: Hca) -> Port | None:
    """The lowest port that can carry traffic."""
    return next((port for port in hca.ports if _port_fault(port) is None), None)


def _selected(hca: Hca, selectors: Selectors) -> _Verdict:
    if any(fnmatchcase(hca.name, pattern) for pattern in selectors.exclude):
        return "excluded", "excluded by the user's list"
    if selectors.include and not any(fnmatchcase(hca.name, pattern) for pattern in selectors.include):
        return "not-included", f"not in the user's list {', '.join(selectors.include)}"
    return None


def _unusable(hca: Hca) -> _Verdict:
    if hca.uverbs is None:
        return "no-uverbs", "no uverbs device under /sys/class/infiniband_verbs: load the ib_uverbs module"
    if hca.node == "missing":
        return "no-uverbs", (
            f"no device file /dev/infiniband/{hca.uverbs}: not given to this container, request the RDMA resource"
        )
    if hca.node == "denied":
        return "no-uverbs", f"/dev/infiniband/{hca.uverbs} cannot be opened for reading and writing by this user"
    if not hca.ports:
        return "no-port", "it has no port"
    faults = [fault for fault in map(_port_fault, hca.ports) if fault is not None]
    if len(faults) == len(hca.ports):
        return faults[0][0], "; ".join(reason for _, reason in faults)
    return None


def _port_fault(port: Port) -> _Verdict:
    if port.state != "ACTIVE":
        return "not-active", f"port {port.number} is {port.state or 'in an unknown state'}, not ACTIVE"
    if port.link_layer not in ("InfiniBand", "Ethernet"):
        return "link-layer", f"port {port.number} has the link layer {port.link_layer or 'unknown'!r}, no network"
    if not port.gids:
        return "no-gid", f"port {port.number} has an empty GID table: give its network device an address"
    return None


def _layer(hca: Hca) -> str:
    port = usable_port(hca)
    return port.link_layer if port else ""


def rate_of(hca: Hca) -> float:
    """Rate of the usable port in Gb/s, 0 where unknown."""
    port = usable_port(hca)
    return port.rate if port else 0.0


def _virtual(keep: Sequence[Hca], fabric: Fabric) -> dict[str, tuple[str, str]]:
    """Virtual functions whose physical function is usable too: they are meant for other containers.

    A bond sits on the first function of its card, so cards are compared, not functions.
    """
    physical = {hca.slot: hca.name for hca in keep if hca.physfn is None and hca.address}
    return {
        hca.name: ("virtual", f"virtual function of {physical[card]}, which is usable itself")
        for hca in keep
        if hca.physfn and (card := hca.physfn.rpartition(".")[0]) in physical
    }


def _slow(keep: Sequence[Hca], fabric: Fabric) -> dict[str, tuple[str, str]]:
    """Less than half the rate of the rails: management or storage. The rails are what has most bandwidth in sum."""
    sums: dict[tuple[str, float], float] = {}
    for hca in keep:
        kind = (_layer(hca), rate_of(hca))
        sums[kind] = sums.get(kind, 0.0) + kind[1]
    if not sums:
        return {}
    layer, rail = max(sums, key=lambda kind: (sums[kind], kind))
    words = f"is far below the {rail:g} Gb/s of the other HCAs: management or storage"
    return {
        hca.name: ("slow", f"{rate_of(hca):g} Gb/s {words}")
        for hca in keep
        # Slow Ethernet beside InfiniBand rails goes by the next rule, whose reason says more.
        if rate_of(hca) < rail / 2 and (layer != "InfiniBand" or _layer(hca) == layer)
    }


def _beside_infiniband(keep: Sequence[Hca], fabric: Fabric) -> dict[str, tuple[str, str]]:
    if not any(_layer(hca) == "InfiniBand" for hca in keep):
        return {}
    reason = "Ethernet beside InfiniBand: another network, for management or storage"
    return {hca.name: ("ethernet", reason) for hca in keep if _layer(hca) == "Ethernet"}


def _dpu(keep: Sequence[Hca], fabric: Fabric) -> dict[str, tuple[str, str]]:
    """BlueField cards beside ConnectX cards, unless they hang off a GPU's switch (then they are SuperNICs)."""
    blue = [hca for hca in keep if hca.vendor == _MELLANOX and hca.device in _BLUEFIELD]
    if len(blue) == len(keep):
        return {}
    reason = "a BlueField DPU beside other NICs and on no GPU's switch: it serves the host's own network"
    return {hca.name: ("dpu", reason) for hca in blue if not _on_switch(hca, fabric)}


def _uplink(keep: Sequence[Hca], fabric: Fabric) -> dict[str, tuple[str, str]]:
    """The NIC of the default route, where the machine has enough others: at least two, and one for two GPUs."""
    uplinks = [hca for hca in keep if hca.default_route]
    if len(keep) - len(uplinks) < max(2, (len(fabric.gpus) + 1) // 2):
        return {}
    reason = "carries the default route while the other HCAs suffice: management"
    return {hca.name: ("default-route", reason) for hca in uplinks}


def _off_rail(keep: Sequence[Hca], fabric: Fabric) -> dict[str, tuple[str, str]]:
    """Where every GPU has an HCA on its switch, the few HCAs on no GPU's switch are for storage or management."""
    on = {hca.name for hca in keep if _on_switch(hca, fabric)}
    served = all(any(_near(fabric.distance(gpu, hca)) for hca in keep) for gpu in fabric.gpus)
    if len(fabric.gpus) < 2 or not served or len(keep) - len(on) >= len(on):
        return {}
    reason = "on no GPU's PCIe switch while every GPU has an HCA on its own: storage or management"
    return {hca.name: ("off-rail", reason) for hca in keep if hca.name not in on}


def _on_switch(hca: Hca, fabric: Fabric) -> bool:
    return any(_near(fabric.distance(gpu, hca)) for gpu in fabric.gpus)


def _near(distance: Distance | None) -> bool:
    return distance is not None and distance <= Distance.PXB


_UNSUITABLE: tuple[Callable[[Sequence[Hca], Fabric], dict[str, tuple[str, str]]], ...] = (
    _virtual,
    _slow,
    _beside_infiniband,
    _dpu,
    _uplink,
    _off_rail,
)
