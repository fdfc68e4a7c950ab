"""Choose HCAs for each GPU: the nearest usable rails, with ties spread over the GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transfer_queue.fabric.filters import Exclusion, Selectors, Sifted, sift
from transfer_queue.fabric.model import Distance, Fabric, Gpu, Hca
from transfer_queue.fabric.spread import spread

__all__ = ["Choice", "GpuChoice", "choose"]


@dataclass(frozen=True)
class GpuChoice:
    """HCAs of one GPU."""

    gpu: Gpu
    hcas: tuple[str, ...]  #: to use, best first; empty only if no HCA is usable
    fallback: tuple[str, ...]  #: the other usable ones, best first
    distance: Distance | None  #: of the HCAs to use, None where unknown
    reason: str


@dataclass(frozen=True)
class Choice:
    """The outcome for every GPU of the container."""

    gpus: tuple[GpuChoice, ...]
    usable: tuple[Hca, ...]  #: by place in the machine
    excluded: tuple[Exclusion, ...]
    warnings: tuple[str, ...]
    degraded: tuple[str, ...] = ()  #: GPUs whose rail is unusable, each with the HCA that it uses instead


def choose(fabric: Fabric, selectors: Selectors | None = None) -> Choice:
    """Decide for every GPU that the container was given.

    GPUs of other containers take part in the spreading where they compete for the same HCAs, that is, unless this
    container was given only some of the machine's HCAs.
    """
    sifted = sift(fabric, selectors or Selectors())
    mine = [gpu for gpu in fabric.gpus if gpu.in_container]
    own_hcas = any(hca.node in ("missing", "denied") for hca in fabric.hcas)
    rivals = sorted(mine if own_hcas and mine else fabric.gpus, key=lambda gpu: gpu.address)
    candidates, chosen = _assign(fabric, sifted, sifted.usable, rivals)
    choices = [
        _explain(fabric, gpu, sifted, candidates[position], chosen, position, rivals)
        for position, gpu in enumerate(rivals)
        if gpu.in_container
    ]
    degraded = _degraded(fabric, sifted, chosen, rivals)
    warnings = (*_warnings(fabric, sifted.usable), *sifted.notes)
    return Choice(tuple(choices), sifted.usable, sifted.excluded, warnings, degraded)


def _assign(
    fabric: Fabric, sifted: Sifted, hcas: Sequence[Hca], gpus: Sequence[Gpu]
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """For each GPU the equally good HCAs, and the HCAs that it gets."""
    candidates = [_nearest(fabric, sifted, gpu, hcas) for gpu in gpus]
    return candidates, spread(candidates, [gpu.numa for gpu in gpus], {hca.name: hca.numa for hca in hcas})


def _rank(distance: Distance | None) -> int:
    return int(Distance.SYS) + 1 if distance is None else int(distance)


def _merit(fabric: Fabric, sifted: Sifted, gpu: Gpu, hca: Hca) -> tuple[int, float]:
    return (_rank(fabric.distance(gpu, hca)), -sifted.roles.rates[hca.name])


def _nearest(fabric: Fabric, sifted: Sifted, gpu: Gpu, hcas: Sequence[Hca]) -> tuple[str, ...]:
    """The fastest of the HCAs at the smallest distance."""
    best = min((_merit(fabric, sifted, gpu, hca) for hca in hcas), default=None)
    return tuple(hca.name for hca in hcas if _merit(fabric, sifted, gpu, hca) == best)


def _degraded(
    fabric: Fabric, sifted: Sifted, chosen: Sequence[tuple[str, ...]], gpus: Sequence[Gpu]
) -> tuple[str, ...]:
    """GPUs that would have a nearer HCA, or share it with fewer GPUs, if every rail were usable."""
    _, ideal = _assign(fabric, sifted, sifted.rails, gpus)
    reasons = {exclusion.hca: exclusion.reason for exclusion in sifted.excluded}

    def cost(gpu: Gpu, names: tuple[str, ...], all_names: Sequence[tuple[str, ...]]) -> tuple[int, int]:
        distance = fabric.distances.get((gpu.address, names[0]))
        return (_rank(distance), min(sum(name in other for other in all_names) for name in names))

    found = []
    for gpu, wanted, names in zip(gpus, ideal, chosen, strict=True):
        if not gpu.in_container or not wanted or not names or cost(gpu, names, chosen) <= cost(gpu, wanted, ideal):
            continue
        lost = [f"{name} ({reasons[name]})" for name in wanted if name in reasons]
        cause = f"its rail {', '.join(lost)} is unusable" if lost else "it shares with a GPU whose rail is unusable"
        distance = fabric.distances.get((gpu.address, names[0]))
        at = "" if distance is None else f" at {distance.name}"
        found.append(f"{gpu.name} is degraded: {cause}; it uses {', '.join(names)}{at}")
    return tuple(found)


def _explain(
    fabric: Fabric,
    gpu: Gpu,
    sifted: Sifted,
    ties: tuple[str, ...],
    chosen: Sequence[tuple[str, ...]],
    position: int,
    rivals: Sequence[Gpu],
) -> GpuChoice:
    hcas, usable, excluded = chosen[position], sifted.usable, sifted.excluded
    rest = sorted(
        (hca for hca in usable if hca.name not in hcas), key=lambda hca: (*_merit(fabric, sifted, gpu, hca), hca.place)
    )
    fallback = tuple(hca.name for hca in rest)
    if not hcas:
        return GpuChoice(gpu, (), (), None, "no usable HCA")
    distance = fabric.distances.get((gpu.address, hcas[0]))
    sharing = [
        rival.name for rival, names in zip(rivals, chosen, strict=True) if rival != gpu and set(names) & set(hcas)
    ]
    words = [_distance_words(distance, ties, hcas, usable)]
    if sharing:
        words.append(f"shared with {', '.join(sharing)}")
    nearer = [
        exclusion.hca
        for exclusion in excluded
        if _rank(fabric.distances.get((gpu.address, exclusion.hca))) <= _rank(distance) and distance is not None
    ]
    if nearer:
        words.append(f"as near or nearer but excluded: {_listed(nearer)}")
    return GpuChoice(gpu, hcas, fallback, distance, "; ".join(words))


def _distance_words(
    distance: Distance | None, ties: tuple[str, ...], hcas: tuple[str, ...], usable: Sequence[Hca]
) -> str:
    if distance is None:
        return (
            f"distance unknown, spread evenly over {len(ties)} equal HCAs" if len(ties) > 1 else "the only usable HCA"
        )
    if len(usable) == 1:
        return f"the only usable HCA, at {distance.name}"
    if len(ties) > len(hcas):
        return f"{len(ties)} HCAs equally near at {distance.name} ({_listed(ties)}), spread evenly"
    return f"nearest at {distance.name}" + ("" if len(hcas) == 1 else f", all {len(hcas)} of that distance")


def _listed(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _warnings(fabric: Fabric, usable: Sequence[Hca]) -> tuple[str, ...]:
    warnings = list(fabric.notes)
    pairs = [fabric.distance(gpu, hca) for gpu in fabric.gpus for hca in usable]
    if pairs and all(distance is None for distance in pairs):
        hidden = all(hca.chain for hca in usable) and all(gpu.chain for gpu in fabric.gpus)
        cause = "every device has a PCI domain of its own" if hidden else "PCI paths are hidden"
        warnings.append(
            f"distance between GPUs and HCAs is unknown ({cause}): GPUs are spread evenly over equal HCAs; if the "
            "machine's vendor has a topology file, name it in NCCL_TOPO_FILE"
        )
    for hca in usable:
        down = [name for name, up in hca.links if not up]
        if down:
            warnings.append(f"{hca.name} is a bond of {len(hca.links)} links and {', '.join(down)} is down")
    return tuple(warnings)
