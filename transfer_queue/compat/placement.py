"""Placement of a program's own actors, as 0.1.x helps with it. Importing this does not import Ray."""

from __future__ import annotations

from typing import Any

from transfer_queue.client.arguments import check_count
from transfer_queue.errors import ConfigError, InvalidInputError, StartError
from transfer_queue.launch.ray_placement import view_nodes

__all__ = ["get_node_round_robin_scheduling_strategies", "get_placement_group"]

_READY_S = 120.0


def get_placement_group(num_ray_actors: int, num_cpus_per_actor: float = 1) -> Any:
    """A placement group with a bundle of ``num_cpus_per_actor`` CPUs for each actor, spread over nodes, once it is
    ready.

    Raises InvalidInputError, InvalidTypeError, StartError if Ray has not reserved it within two minutes.
    """
    if check_count("num_ray_actors", num_ray_actors) < 1:
        raise InvalidInputError(f"num_ray_actors must be at least 1, not {num_ray_actors}")
    ray = _initialized_ray()
    from ray.util import placement_group, remove_placement_group

    group = placement_group([{"CPU": num_cpus_per_actor} for _ in range(num_ray_actors)], strategy="SPREAD")
    try:
        ray.get(group.ready(), timeout=_READY_S)
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        raise StartError(
            f"Ray did not reserve {num_ray_actors} bundles of {num_cpus_per_actor:g} CPUs within {_READY_S:g} s; free "
            "are " + ", ".join(f"{value:g} {name}" for name, value in sorted(ray.available_resources().items()))
        ) from None
    return group


def get_node_round_robin_scheduling_strategies(num_actors: int, required_node_resource: str | None = None) -> list[Any]:
    """A scheduling strategy for each actor: round robin over the living nodes that offer the resource.

    Raises InvalidInputError; ConfigError (a ValueError) naming a resource that no node offers; StartError.
    """
    if check_count("num_actors", num_actors) < 1:
        raise InvalidInputError(f"num_actors must be at least 1, not {num_actors}")
    ray = _initialized_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = view_nodes(ray.nodes())
    able = [node for node in nodes if required_node_resource is None or node.offers(required_node_resource, 1e-3)]
    if not able:
        raise ConfigError(f"required_node_resource: no node of the Ray cluster offers {required_node_resource!r}")
    return [
        NodeAffinitySchedulingStrategy(able[number % len(able)].node_id, soft=False) for number in range(num_actors)
    ]


def _initialized_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise StartError("placement needs Ray: pip install 'TransferQueue[ray]'") from None
    if not ray.is_initialized():
        raise StartError("placement needs a Ray cluster: call ray.init() first")
    return ray
