"""What a controller tells those who connect, besides the fields of its Welcome."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transfer_queue.control.directory import Shard

if TYPE_CHECKING:
    from transfer_queue.config.processes import ControllerConfig
    from transfer_queue.runtime.connection import Connection
    from transfer_queue.runtime.controller import Controller

__all__ = ["client_attributes", "identity"]

_MOST_GUESTS = 10_000
"""Moved partitions that a client is told of; the answer ``Moved`` tells it of others."""


def identity(config: ControllerConfig) -> dict[str, Any]:
    """Identity of the queue, and the number of this controller if there are several."""
    shard = Shard(config.shard, config.shards).attribute() if config.shards else {}
    return {**shard, "uid": config.uid} if config.uid else shard


def client_attributes(controller: Controller, connection: Connection, writer: int) -> dict[str, Any]:
    """``Welcome.attributes`` for the client whose session has number ``writer``."""
    config, access = controller.config, controller.access
    attributes: dict[str, Any] = {"secondary": True, "sampler": config.sampler.name, **identity(config)}
    if controller.metrics_address:
        attributes["metrics"] = controller.metrics_address
    if config.lease_s:
        attributes["lease"] = config.lease_s
    if guests := controller.core.state.moves.here:
        seen = list(guests) if access is None else access.visible_names(connection, guests)
        attributes["guests"] = seen[-_MOST_GUESTS:]
    if config.allow_pickle is not None:
        attributes["pickle"] = config.allow_pickle
    if access is not None and access.limited and connection.principal is not None:
        attributes["ticket"] = controller.tickets.ticket(controller.run, writer, connection.principal)
    return attributes
