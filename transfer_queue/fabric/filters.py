"""Which HCAs may carry queue traffic at all. Distance comes later: a near NIC that is down or slow is still wrong.

There are two kinds of rules. *Unusable*: the device cannot work (port down, no GID, no device file ...). *Unsuitable*:
it is not a rail (``roles``). Rails are determined on all HCAs of the machine first, so a dead rail never turns a
storage or management card into a rail. A list of names given by the user switches the rules of the second kind off.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from transfer_queue.fabric.model import Fabric, Hca, Port
from transfer_queue.fabric.roles import Roles, classify, given, is_efa

__all__ = ["Exclusion", "Selectors", "Sifted", "rate_of", "sift", "usable_port"]


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


@dataclass(frozen=True)
class Sifted:
    """The HCAs of a machine by use; each part is ordered by place in the machine."""

    usable: tuple[Hca, ...]
    rails: tuple[Hca, ...]  #: HCAs that would be usable if every port were alive and no name excluded
    excluded: tuple[Exclusion, ...]
    notes: tuple[str, ...]
    roles: Roles


_Verdict = tuple[str, str] | None  # rule, reason


def sift(fabric: Fabric, selectors: Selectors) -> Sifted:
    """Sort the HCAs of the machine into usable HCAs, rails, and excluded HCAs with the reason.

    If this container has HCAs but no rail, these HCAs are used, because the device plugin was configured to give them,
    and a note says so. Dead rails do not count as this case.
    """
    roles = classify(fabric)
    hcas = sorted(fabric.hcas, key=lambda hca: hca.place)
    unsuitable = {} if selectors.include else dict(roles.unsuitable)
    rails = [hca for hca in hcas if given(hca) and _included(hca, selectors) and hca.name not in unsuitable]
    notes: tuple[str, ...] = ()
    if not rails and unsuitable:
        rails = [hca for hca in hcas if given(hca) and not is_efa(hca)]
        if rails:
            notes = (f"none of {', '.join(hca.name for hca in rails)}, the HCAs given to this container, is a rail",)
        for hca in rails:
            unsuitable.pop(hca.name, None)
    usable: list[Hca] = []
    excluded: list[Exclusion] = []
    for hca in hcas:
        verdict = _selected(hca, selectors) or _unusable(hca) or unsuitable.get(hca.name)
        if verdict is None:
            usable.append(hca)
        else:
            excluded.append(Exclusion(hca.name, *verdict))
    return Sifted(tuple(usable), tuple(rails), tuple(excluded), notes, roles)


def usable_port(hca: Hca) -> Port | None:
    """The lowest port that can carry traffic."""
    return next((port for port in hca.ports if _port_fault(port) is None), None)


def _included(hca: Hca, selectors: Selectors) -> bool:
    return not selectors.include or any(fnmatchcase(hca.name, pattern) for pattern in selectors.include)


def _selected(hca: Hca, selectors: Selectors) -> _Verdict:
    if any(fnmatchcase(hca.name, pattern) for pattern in selectors.exclude):
        return "excluded", "excluded by the user's list"
    if not _included(hca, selectors):
        return "not-included", f"not in the user's list {', '.join(selectors.include)}"
    return None


def _unusable(hca: Hca) -> _Verdict:
    if is_efa(hca):
        return "efa", (
            "an AWS Elastic Fabric Adapter (EFA), which has no InfiniBand or RoCE port: Mooncake's protocol rdma "
            "cannot use it, set protocol: tcp for the queue"
        )
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


def rate_of(hca: Hca) -> float:
    """Rate of the usable port in Gb/s, 0 where unknown."""
    port = usable_port(hca)
    return port.rate if port else 0.0
