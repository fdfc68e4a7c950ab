"""Spread GPUs over equally good HCAs: evenly, deterministically, and independent of names and listing order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["spread"]


def spread(
    candidates: Sequence[tuple[str, ...]], numa: Sequence[int], hca_numa: Mapping[str, int]
) -> list[tuple[str, ...]]:
    """HCAs for each GPU out of its candidates.

    ``candidates[i]`` are the equally good HCAs of the i-th GPU, GPUs and HCAs both in the order of their place in the
    machine. Each GPU gets one HCA such that the HCAs' loads are as even as the candidates allow (an optimal
    semi-matching; Harvey et al., "Semi-matchings for bipartite graphs and load balancing", 2006). HCAs left over then
    go to the GPU with the fewest, so that none idles. Among equals the same NUMA node wins, then the place.
    """
    order = {name: position for position, name in enumerate(dict.fromkeys(n for c in candidates for n in c))}
    users: dict[str, list[int]] = {name: [] for name in order}
    for gpu in range(len(candidates)):
        if candidates[gpu]:
            _assign(gpu, candidates, numa, hca_numa, order, users)
    chosen = [[name for name in order if gpu in users[name]] for gpu in range(len(candidates))]
    for name in order:
        if not users[name]:
            takers = [gpu for gpu in range(len(candidates)) if name in candidates[gpu]]
            taker = min(takers, key=lambda gpu: (len(chosen[gpu]), numa[gpu] != hca_numa[name], gpu))
            chosen[taker].append(name)
    return [tuple(names) for names in chosen]


def _assign(
    gpu: int,
    candidates: Sequence[tuple[str, ...]],
    numa: Sequence[int],
    hca_numa: Mapping[str, int],
    order: Mapping[str, int],
    users: dict[str, list[int]],
) -> None:
    """Give one more GPU an HCA, moving earlier GPUs along a path to the least loaded HCA that can be reached."""
    reached: dict[str, tuple[int, str | None]] = {}  # HCA -> the GPU that would move to it, and from where
    pending: list[tuple[int, str | None]] = [(gpu, None)]
    while pending:
        mover, origin = pending.pop(0)
        for name in candidates[mover]:
            if name not in reached:
                reached[name] = (mover, origin)
                pending += [(user, name) for user in users[name]]

    def cost(name: str) -> tuple[int, bool, bool, int]:
        mover, origin = reached[name]
        return (len(users[name]), origin is not None, numa[mover] != hca_numa[name], order[name])

    target: str | None = min(reached, key=cost)
    while target is not None:
        mover, origin = reached[target]
        if origin is not None:
            users[origin].remove(mover)
        users[target].append(mover)
        target = origin
