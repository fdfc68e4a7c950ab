"""The role of each HCA of a machine: a rail of the GPUs, or another network (storage, management, other containers).

Roles describe the machine, not its health: every HCA counts, even if its port is down, its device file is missing or
its name is excluded. A dead rail therefore does not change the roles of the others. A port that is down does not report
its real rate (it reports 10 or 40 Gb/s), so it counts with the rate of the live HCAs like it; without any, its rate is
unknown and not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transfer_queue.fabric.model import Distance, Fabric, Hca, Port

__all__ = ["Roles", "classify", "given", "is_efa"]

_AMAZON = 0x1D0F
_MELLANOX = 0x15B3
_BLUEFIELD = frozenset({0xA2D2, 0xA2D6, 0xA2DC, 0xA2DF})

_Verdicts = dict[str, tuple[str, str]]  # HCA -> rule, reason


@dataclass(frozen=True)
class Roles:
    """The role of every HCA of a machine."""

    unsuitable: Mapping[str, tuple[str, str]]  #: HCA -> rule and reason; all other HCAs are rails
    rates: Mapping[str, float]  #: HCA -> Gb/s; a dead port has the rate of the live HCAs like it; 0 if unknown


@dataclass(frozen=True)
class _Machine:
    """Input of the rules: distances, and link layer and rate of each HCA, dead or alive."""

    fabric: Fabric
    layers: Mapping[str, str]  #: empty where unknown
    rates: Mapping[str, float]

    def on_switch(self, hca: Hca) -> bool:
        return _on_switch(hca, self.fabric)


def classify(fabric: Fabric) -> Roles:
    """Determine the role of every HCA. The rules run in order, each over the HCAs that earlier rules left."""
    hcas = sorted(fabric.hcas, key=lambda hca: hca.place)
    machine = _Machine(fabric, {hca.name: _layer(hca) for hca in hcas}, _rates(hcas, fabric))
    functions = _functions(hcas)
    unsuitable: _Verdicts = {}
    keep = [hca for hca in hcas if hca.name not in functions and not is_efa(hca)]
    for rule in _RULES:
        verdicts = rule(keep, machine)
        unsuitable |= verdicts
        keep = [hca for hca in keep if hca.name not in verdicts]
    for name, card in functions.items():
        if given(card):
            unsuitable[name] = ("virtual", f"virtual function of {card.name}, which is given to this container itself")
        elif card.name in unsuitable:
            unsuitable[name] = unsuitable[card.name]
    return Roles(unsuitable, machine.rates)


def given(hca: Hca) -> bool:
    """Whether this container may open the HCA."""
    return hca.node not in ("missing", "denied")


def is_efa(hca: Hca) -> bool:
    """Whether it is an AWS Elastic Fabric Adapter, which has its own protocol."""
    return hca.vendor == _AMAZON


def _functions(hcas: Sequence[Hca]) -> dict[str, Hca]:
    """Virtual functions whose physical function is visible. They have the role of the card.

    A bond sits on the first function of its card, so cards are compared, not functions.
    """
    cards: dict[str, Hca] = {}
    for hca in hcas:
        if hca.physfn is None and hca.address:
            cards.setdefault(hca.slot, hca)
    return {
        hca.name: cards[slot]
        for hca in hcas
        if hca.physfn is not None and (slot := hca.physfn.rpartition(".")[0]) in cards
    }


def _alive(port: Port) -> bool:
    return port.state == "ACTIVE"


def _port(hca: Hca) -> Port | None:
    """The port that decides: live ports come before dead ports, known networks before unknown ones."""
    known = sorted(hca.ports, key=lambda port: (not _alive(port), port.link_layer not in _LAYERS, port.number))
    return known[0] if known else None


_LAYERS = ("InfiniBand", "Ethernet")


def _layer(hca: Hca) -> str:
    port = _port(hca)
    return port.link_layer if port is not None and port.link_layer in _LAYERS else ""


def _rates(hcas: Sequence[Hca], fabric: Fabric) -> dict[str, float]:
    told = {hca.name: port.rate if (port := _port(hca)) is not None else 0.0 for hca in hcas}
    alive = [hca for hca in hcas if any(map(_alive, hca.ports))]

    def alike(hca: Hca) -> tuple[object, ...]:
        return (_layer(hca), hca.vendor, hca.device, hca.physfn is None)

    rates = dict(told)
    for hca in hcas:
        if hca in alive:
            continue
        like = [other for other in alive if alike(other) == alike(hca)]
        place = _on_switch(hca, fabric)
        like = [other for other in like if _on_switch(other, fabric) == place] or like
        sums: dict[float, float] = {}
        for other in like:
            sums[told[other.name]] = sums.get(told[other.name], 0.0) + told[other.name]
        usual = max(sums, key=lambda rate: (sums[rate], rate), default=0.0)
        rates[hca.name] = max(told[hca.name], usual) if usual else 0.0
    return rates


def _slow(keep: Sequence[Hca], machine: _Machine) -> _Verdicts:
    """HCAs with less than half the rate of the rails, the kind with the highest total bandwidth."""
    sums: dict[tuple[str, float], float] = {}
    for hca in keep:
        kind = (machine.layers[hca.name], machine.rates[hca.name])
        if kind[0]:
            sums[kind] = sums.get(kind, 0.0) + kind[1]
    if not sums:
        return {}
    layer, rail = max(sums, key=lambda kind: (sums[kind], kind))
    words = f"is far below the {rail:g} Gb/s of the other HCAs: management or storage"
    return {
        hca.name: ("slow", f"{machine.rates[hca.name]:g} Gb/s {words}")
        for hca in keep
        # The next rule covers slow Ethernet beside InfiniBand rails, with a clearer reason.
        if machine.layers[hca.name]
        and 0 < machine.rates[hca.name] < rail / 2
        and (layer != "InfiniBand" or machine.layers[hca.name] == layer)
    }


def _beside_infiniband(keep: Sequence[Hca], machine: _Machine) -> _Verdicts:
    if not any(machine.layers[hca.name] == "InfiniBand" for hca in keep):
        return {}
    reason = "Ethernet beside InfiniBand: another network, for management or storage"
    return {hca.name: ("ethernet", reason) for hca in keep if machine.layers[hca.name] == "Ethernet"}


def _dpu(keep: Sequence[Hca], machine: _Machine) -> _Verdicts:
    """BlueField cards beside ConnectX cards, unless they are on a GPU's switch (then they are SuperNICs)."""
    blue = [hca for hca in keep if hca.vendor == _MELLANOX and hca.device in _BLUEFIELD]
    if len(blue) == len(keep):
        return {}
    reason = "a BlueField DPU beside other NICs and on no GPU's switch: it serves the host's own network"
    return {hca.name: ("dpu", reason) for hca in blue if not machine.on_switch(hca)}


def _off_rail(keep: Sequence[Hca], machine: _Machine) -> _Verdicts:
    """If every GPU has an HCA on its switch, the few HCAs on no GPU's switch are for storage or management."""
    gpus = machine.fabric.gpus
    on = {hca.name for hca in keep if machine.on_switch(hca)}
    served = all(any(_near(machine.fabric.distance(gpu, hca)) for hca in keep) for gpu in gpus)
    if len(gpus) < 2 or not served or len(keep) - len(on) >= len(on):
        return {}
    reason = "on no GPU's PCIe switch while every GPU has an HCA on its own: storage or management"
    return {hca.name: ("off-rail", reason) for hca in keep if hca.name not in on}


def _uplink(keep: Sequence[Hca], machine: _Machine) -> _Verdicts:
    """The NIC of the default route, if the machine has enough others: at least two, and one for two GPUs.

    The only HCA on a GPU's switch is the GPU's rail, even if it carries the default route.
    """
    gpus = machine.fabric.gpus
    others = [hca for hca in keep if not hca.default_route]
    if len(others) < max(2, (len(gpus) + 1) // 2):
        return {}
    alone = [gpu for gpu in gpus if not any(_near(machine.fabric.distance(gpu, hca)) for hca in others)]
    reason = "carries the default route while the other HCAs suffice: management"
    return {
        hca.name: ("default-route", reason)
        for hca in keep
        if hca.default_route and not any(_near(machine.fabric.distance(gpu, hca)) for gpu in alone)
    }


def _on_switch(hca: Hca, fabric: Fabric) -> bool:
    return any(_near(fabric.distance(gpu, hca)) for gpu in fabric.gpus)


def _near(distance: Distance | None) -> bool:
    return distance is not None and distance <= Distance.PXB


_RULES: tuple[Callable[[Sequence[Hca], _Machine], _Verdicts], ...] = (
    _slow,
    _beside_infiniband,
    _dpu,
    _off_rail,
    # Last, because a rail that carries the default route still helps to recognize the others.
    _uplink,
)
