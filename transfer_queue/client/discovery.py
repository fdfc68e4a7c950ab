"""Discovery of a queue from the address, the environment or Ray."""

from __future__ import annotations

import importlib
from typing import Any

from transfer_queue.client.options import MissingFields, in_ray
from transfer_queue.config.attach import (
    AttachConfig,
    AttachSecurity,
    ControllerAddresses,
    attach_from_environment,
    parse_address,
)
from transfer_queue.config.server_info import ZMQServerInfo, controller_address
from transfer_queue.errors import ConfigError, InvalidInputError, InvalidTypeError

__all__ = ["attach_config_of", "queue_at", "ray_launcher"]


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


def ray_launcher() -> Any:
    """The module that starts and finds queues in Ray, if the program has initialized Ray."""
    return importlib.import_module("transfer_queue.launch.ray_cluster") if in_ray() else None


def attach_config_of(controller_info: AttachConfig | ZMQServerInfo | str) -> AttachConfig:
    """Convert ``controller_info`` of a client to settings. Raises InvalidInputError, InvalidTypeError."""
    if controller_info is None:
        raise InvalidInputError("controller_info is None; pass an AttachConfig, a ZMQServerInfo or host:port")
    if isinstance(controller_info, AttachConfig):
        return controller_info
    missing: MissingFields | None = None
    security: AttachSecurity | None = None
    if isinstance(controller_info, ZMQServerInfo):  # only programs of 0.1.x have one
        if controller_info.secret is not None:
            security = AttachSecurity(secret=controller_info.secret)
        controller_info, missing = controller_address(controller_info), "drop"
    if isinstance(controller_info, str):
        try:
            parse_address(controller_info)
        except ConfigError as error:
            raise InvalidInputError(f"controller_info: {error}") from None
        known = None if security is not None else queue_at(controller_info)
        if known is not None:
            return known.model_copy(update={"missing_fields": missing})
        return AttachConfig(
            controller=ControllerAddresses(addresses=[controller_info]),
            missing_fields=missing,
            security=security or AttachSecurity(),
        )
    raise InvalidTypeError(
        f"controller_info must be an AttachConfig, a ZMQServerInfo or host:port, not {type(controller_info).__name__}"
    )
