"""``init()`` in a Ray program: find the queue of the cluster by its named actor, or start it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from omegaconf import DictConfig, open_dict
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from transfer_queue.compat import actor_class
from transfer_queue.compat.server_info import Role, server_info
from transfer_queue.config.attach import AttachConfig
from transfer_queue.config.processes import StorageUnitConfig
from transfer_queue.errors import ConnectionLostError, StartError, TransferQueueError
from transfer_queue.launch.conf import merge_settings, plan_queue, ray_settings, start_store
from transfer_queue.launch.plan import MEMORY_SHARE
from transfer_queue.launch.ray_actors import MAX_CALLS
from transfer_queue.launch.ray_placement import RaySettings, place_units, view_nodes
from transfer_queue.runtime.secret import new_secret

__all__ = ["RayQueue", "find", "find_or_start"]

log = logging.getLogger(__name__)

Conf = DictConfig | Mapping[str, Any] | None

_PAUSE_S = 0.1
_STOP_S = 40.0
_EXIT_S = 5.0
_RESOURCE_SHARE = 1e-3
"""Share of ``required_node_resource`` that a unit reserves, so that a restarted one stays on such nodes."""


class RayQueue:
    """A queue of this Ray cluster, as a process that uses it sees it."""

    def __init__(self, controller: Any, attach_config: AttachConfig, settings: RaySettings, *, created: bool) -> None:
        self.attach_config = attach_config
        self.created = created
        """Did this process start it?"""
        self.detached = settings.lifetime == "detached"
        self._controller = controller
        self._settings = settings
        self._end: Any = None
        self.resources: Any = None
        """Resources of the bootstrap of a registered storage manager, kept as long as this object."""

    def when_ended(self, tell: Callable[[str], None]) -> None:
        """Call ``tell`` with the reason once the controller has ended, from a thread of Ray's."""

        def done(future: Any) -> None:
            error = future.exception()
            tell(f"the queue's controller, {self._who}, ended: {_one_line(error) if error else future.result()}")

        self._end = self._controller.ended.remote().future()
        self._end.add_done_callback(done)

    def stop(self) -> None:
        """End the queue for every process, unless it is detached. Idempotent."""
        if self.detached or not ray.is_initialized():
            return
        if not self.created:
            log.warning("close() in a process that had attached ends the queue of %s for all processes", self._who)
        try:
            _get(self._controller.stop.remote("transfer_queue.close() was called"), _STOP_S)
            # An actor that exits by itself sends its answers to `ended` first. ray.kill() alone could overtake them,
            # and other processes would not hear the reason.
            with contextlib.suppress(RayActorError, GetTimeoutError):
                _get(self._controller.__ray_terminate__.remote(), _EXIT_S)
            ray.kill(self._controller, no_restart=True)  # frees the name at once
        except RayActorError:
            pass  # it has ended already
        except RayError as error:
            log.warning("the queue of %s was not stopped in order: %s", self._who, _one_line(error))

    @property
    def _who(self) -> str:
        return f"Ray actor {self._settings.name} in namespace {self._settings.namespace}"


def find(conf: Conf = None) -> RayQueue | None:
    """The queue of this cluster, once it is up; None if there is none.

    Raises ConnectionLostError if its controller does not answer.
    """
    settings = ray_settings(merge_settings(conf, in_ray=True))
    try:
        return _attach(settings)
    except (RayActorError, StartError):
        return None


def find_or_start(conf: Conf = None) -> tuple[RayQueue, DictConfig]:
    """The queue of this cluster; of several processes that ask at once, one starts it and the others find it.

    Raises ConfigError before anything is started, StartError, ConnectionLostError.
    """
    merged = merge_settings(conf, in_ray=True)
    settings = ray_settings(merged)
    deadline = time.monotonic() + settings.start_timeout
    while True:
        try:
            found = _attach(settings)
            if found is not None:
                return found, merged
        except RayActorError as error:  # it is ending, or the process that was starting it is gone
            failure = _one_line(error)
        except StartError as error:  # the actor outlived its server
            failure = str(error)
            ray.kill(ray.get_actor(settings.name, settings.namespace), no_restart=True)
        else:
            try:
                return _start(merged, settings), merged
            except _NameTaken:
                failure = "another process keeps starting it and failing"
        if time.monotonic() >= deadline:
            raise StartError(f"no queue within ray.start_timeout, {settings.start_timeout:g} s: {failure}")
        time.sleep(_PAUSE_S)


class _NameTaken(Exception):
    """Another process has started the queue."""


def _attach(settings: RaySettings) -> RayQueue | None:
    """Raises RayActorError if the actor is dead, StartError if it has outlived its server, ConnectionLostError."""
    try:
        controller = ray.get_actor(settings.name, settings.namespace)
    except ValueError:
        return None
    try:
        config, detached = _get(controller.attach_config.remote(), settings.start_timeout)
    except GetTimeoutError:
        raise ConnectionLostError(
            f"the queue of Ray actor {settings.name} in namespace {settings.namespace} is not up after "
            f"{settings.start_timeout:g} s; see `ray list actors`, or raise ray.start_timeout"
        ) from None
    except RayTaskError as error:
        if isinstance(error.cause, TransferQueueError):
            raise error.cause from None
        raise
    found = settings.model_copy(update={"lifetime": "detached" if detached else None})
    return RayQueue(controller, config, found, created=False)


def _start(merged: DictConfig, settings: RaySettings) -> RayQueue:
    resources = start_store(merged, allow_ray=True)
    plan = plan_queue(merged, allow_ray=True).identified(new_secret()[:32], new_secret())
    resource = merged.backend.SimpleStorage.required_node_resource
    nodes = place_units(view_nodes(ray.nodes()), len(plan.units), settings, resource)
    detached = settings.lifetime == "detached"
    common: dict[str, Any] = {
        "num_cpus": settings.num_cpus,
        "lifetime": settings.lifetime,
        "max_concurrency": MAX_CALLS,
    }
    try:
        controller = actor_class.TransferQueueController.options(
            name=settings.name, namespace=settings.namespace, **common
        ).remote(plan=plan.controller, master=plan.master, shards=plan.shards)
    except ValueError as error:
        if "already" not in str(error):
            raise
        raise _NameTaken from None
    started = [controller]
    try:
        addresses = _wait([controller.addresses.remote()], "the controller", settings)[0]
        if plan.master is not None:
            backend = _wait([controller.backend.remote(plan.controller.backend)], "the controller", settings)[0]
            plan = plan.with_backend_settings(backend.settings)
            merged.backend.MooncakeStore.master_server_address = backend.settings["masterServerAddress"]
            merged.backend.MooncakeStore.metadata_server = backend.settings["metadataServer"]
        units = _start_units(plan.unit_configs(*addresses), settings, nodes, resource, common)
        started += units
        _wait([unit.addresses.remote() for unit in units], f"{len(units)} storage units", settings)
        config = plan.attach_config(*addresses)
        with open_dict(merged):  # what another process needs to attach without Ray
            merged.controller.zmq_info = server_info(Role.CONTROLLER, settings.name, addresses[0], plan.secret)
            merged.security = {"allowPickle": config.security.allow_pickle}
        _wait([controller.store_config.remote(merged)], "the controller", settings)
        _wait([controller.publish.remote(config, detached, units)], "the controller", settings)
    except BaseException:
        for actor in reversed(started):
            ray.kill(actor, no_restart=True)
        raise
    queue = RayQueue(controller, config, settings, created=True)
    queue.resources = resources
    return queue


def _start_units(
    configs: list[StorageUnitConfig],
    settings: RaySettings,
    nodes: list[str],
    resource: str | None,
    common: dict[str, Any],
) -> list[Any]:
    units = []
    for number, (config, node) in enumerate(zip(configs, nodes, strict=True)):
        if config.memory_share:
            config = config.model_copy(update={"memory_share": MEMORY_SHARE / nodes.count(node)})
        arguments = {"plan": config, "controller": settings.name, "namespace": settings.namespace}
        options = {
            **common,
            "max_restarts": -1,
            # Soft: a unit whose node is gone may come back on another.
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True),
        }
        if resource is not None:
            options["resources"] = {resource: _RESOURCE_SHARE}
        unit = actor_class.SimpleStorageUnit
        try:
            units.append(unit.options(name=f"TransferQueueStorageUnit#{number}", **options).remote(**arguments))
        except ValueError as error:
            if "already" not in str(error):
                raise
            units.append(unit.options(**options).remote(**arguments))  # of another queue, or one that is ending
    return units


def _wait(references: list[Any], what: str, settings: RaySettings) -> list[Any]:
    deadline = time.monotonic() + settings.start_timeout
    try:
        return [_get(reference, max(0.0, deadline - time.monotonic())) for reference in references]
    except GetTimeoutError:
        free = ray.available_resources().get("CPU", 0)
        raise StartError(
            f"Ray did not place and start {what} within ray.start_timeout, {settings.start_timeout:g} s: each reserves "
            f"{settings.num_cpus:g} CPUs and {free:g} are free in the cluster; free some, lower ray.num_cpus (0 "
            "reserves none), or allow more time"
        ) from None
    except RayError as error:
        raise StartError(f"{what} did not start: {_one_line(error)}") from None


def _get(reference: Any, timeout_s: float) -> Any:
    """``ray.get``; inside an event loop, which an asynchronous actor's method blocks, without Ray's warning of that.

    ``ray.get`` lends out the caller's CPUs meanwhile, which the servers may need.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return ray.get(reference, timeout=timeout_s)
    try:
        return reference.future().result(timeout_s)
    except concurrent.futures.TimeoutError:
        raise GetTimeoutError(f"no answer within {timeout_s:g} s") from None


def _one_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    return " ".join(str(cause).split())
