"""Placement of a queue's servers in a Ray cluster. Pure: settings and nodes in, nodes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from transfer_queue.config.document import Document
from transfer_queue.errors import ConfigError

__all__ = ["NodeView", "RaySettings", "place_units", "view_nodes"]

_HEAD = "node:__internal_head__"
"""Ray gives this resource to its head node alone."""


class RaySettings(Document):
    """The section ``ray`` of the settings given to ``init()``."""

    name: str = Field(default="TransferQueueController", min_length=1)
    """Name of the controller's actor, by which other processes of the cluster find the queue."""
    namespace: str = Field(default="transfer_queue", min_length=1)
    """Ray namespace of that name."""
    lifetime: Literal["detached"] | None = None
    """``detached``: the queue outlives the program that made it, and ``close()``."""
    num_cpus: float = Field(default=1, ge=0)
    """Logical CPUs that each server reserves."""
    use_head_node: bool = False
    """May storage units run on Ray's head node although there are others?"""
    start_timeout: float = Field(default=120, gt=0)
    """Seconds that Ray may take to place the servers, and they to start."""


@dataclass(frozen=True)
class NodeView:
    """A node of the cluster: total logical resources, not what is free."""

    node_id: str
    resources: Mapping[str, float]

    @property
    def is_head(self) -> bool:
        return _HEAD in self.resources

    def offers(self, resource: str, amount: float) -> bool:
        return self.resources.get(resource, 0) >= amount


def view_nodes(listed: Sequence[Mapping[str, Any]]) -> list[NodeView]:
    """The living nodes among what ``ray.nodes()`` gives."""
    return [NodeView(node["NodeID"], dict(node["Resources"])) for node in listed if node["Alive"]]


def place_units(
    nodes: Sequence[NodeView], count: int, settings: RaySettings, required_resource: str | None
) -> list[str]:
    """A node id for each of ``count`` storage units: round robin over the nodes that can take them.

    The head node, which Ray's own services and often the driver share, is left out unless it is the only one or
    ``settings.use_head_node``. Raises ConfigError for a ``required_resource`` that no node offers, and where no node
    has the CPUs.
    """
    found = [node for node in nodes if required_resource is None or node.offers(required_resource, 1e-3)]
    if not found:
        offered = sorted({name for node in nodes for name in node.resources if not name.startswith("node:")})
        raise ConfigError(
            f"backend.SimpleStorage.required_node_resource: no node of the Ray cluster offers {required_resource!r}; "
            f"offered: {', '.join(offered)}"
        )
    able = [node for node in found if node.offers("CPU", settings.num_cpus)]
    if not able:
        raise ConfigError(
            f"ray.num_cpus: no node of the Ray cluster that storage units may use has {settings.num_cpus:g} CPUs; "
            "lower it (0 reserves none), or add nodes"
        )
    workers = [node for node in able if not node.is_head]
    chosen = able if settings.use_head_node or not workers else workers
    return [chosen[number % len(chosen)].node_id for number in range(count)]
