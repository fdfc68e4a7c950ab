"""Discovery of a queue by its address, from the environment or in Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer_queue.client.options import in_ray
from transfer_queue.config.attach import AttachConfig, ControllerAddresses, attach_from_environment
from transfer_queue.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["queue_at", "ray_launcher"]


def queue_at(address: str) -> AttachConfig | None:
    """Name, identity and credentials of the queue at ``address`` (host:port), if the environment or Ray names it."""
    try:
        found = attach_from_environment()
    except ConfigError:  # the environment names another queue
        found = None
    if found is None or address not in found.controller.addresses:
        launched = ray_launcher()
        queue = None if launched is None else launched.find()
        found = None if queue is None else queue.attach_config
    if found is None or address not in found.controller.addresses:
        return None
    only = ControllerAddresses(addresses=[address])
    named = AttachConfig(name=found.name, uid=found.uid, controller=only, security=found.security)
    return named.found_in(found.target.origin)


def ray_launcher() -> ModuleType | None:
    """The module that starts and finds queues in Ray, if the program has initialized Ray."""
    if not in_ray():
        return None
    from transfer_queue.launch import ray_cluster  # imports Ray

    return ray_cluster
