"""``init(conf)`` without a queue to attach to: local server processes from the settings of ``config.yaml``."""

from __future__ import annotations

import base64
import importlib.resources
import inspect
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import msgspec
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError

import transfer_queue.sampler
from transfer_queue.compat.registered.registry import StorageBootstrapProvider, StorageManagerFactory
from transfer_queue.compat.server_info import Role, server_info
from transfer_queue.config import defaults
from transfer_queue.config.document import parse_bytes, validate_document, wrong_type
from transfer_queue.config.init_settings import check_settings
from transfer_queue.config.processes import SamplerChoice
from transfer_queue.errors import ConfigError, InvalidTypeError, StartError
from transfer_queue.launch.local import LocalStack, default_plan
from transfer_queue.launch.mooncake_conf import with_mooncake
from transfer_queue.launch.plan import LocalPlan
from transfer_queue.launch.ray_placement import RaySettings
from transfer_queue.sampler import BaseSampler
from transfer_queue.storage.registry import packaged_backends

__all__ = [
    "MissingSectionError",
    "merge_settings",
    "mooncake_plan",
    "plan_queue",
    "ray_settings",
    "sampler_choice",
    "start_local",
    "start_store",
]

log = logging.getLogger(__name__)

_UNLIMITED = 2**50
"""Bytes; of a store whose limits are its own."""
_KINDS = {"SimpleStorage": "simple", "MooncakeStore": "mooncake", "RayStore": "ray"}


class MissingSectionError(ConfigError, ConfigKeyError):
    """``backend.storage_backend`` names a section that is not there."""

    __str__ = ConfigError.__str__


def start_local(conf: DictConfig | Mapping[str, Any] | None) -> tuple[LocalStack, DictConfig]:
    """Start the queue that ``conf``, merged over the packaged defaults, describes; returns it and the merged settings.

    Raises ConfigError before anything is started, StartError.
    """
    merged = merge_settings(conf)
    resources = start_store(merged)
    stack = LocalStack(plan_queue(merged))
    stack.resources = resources
    return stack, _with_addresses(merged, stack.start())


def start_store(merged: DictConfig, *, allow_ray: bool = False) -> Any:
    """Run the bootstrap of a registered storage manager, which may change ``merged``; returns what it started.

    None for other backends and where none is registered. Raises ConfigError before it runs, StartError if it fails.
    """
    name = merged.backend.storage_backend
    if name in _KINDS or not StorageManagerFactory.stores_by_itself(name):
        return None
    plan_queue(merged, allow_ray=allow_ray)
    provider = StorageBootstrapProvider.get_provider(name)
    if provider is None:
        return None
    try:
        return provider(merged)
    except Exception as error:  # boundary of a user's function
        raise StartError(f"the bootstrap of backend {name!r} failed: {type(error).__name__}: {error}") from error


def plan_queue(merged: DictConfig, *, allow_ray: bool = False) -> LocalPlan:
    """The servers of the queue that ``merged`` describes. ``allow_ray``: may they be those of Ray's object store?

    Raises ConfigError.
    """
    kind = merged.backend.storage_backend
    if kind not in merged.backend:
        raise MissingSectionError(f"backend.storage_backend: {kind!r}: Missing key backend.{kind}")
    if kind == "RayStore" and not allow_ray:
        raise ConfigError("backend.storage_backend: 'RayStore' needs Ray; call ray.init() before transfer_queue.init()")
    registered = kind not in _KINDS and StorageManagerFactory.stores_by_itself(kind)
    packaged = kind not in _KINDS and not registered and kind in packaged_backends()
    if kind not in _KINDS and not registered and not packaged:
        raise ConfigError(
            f"backend.storage_backend: {kind!r} cannot be started by init(); start its servers as docs/backends.md "
            "says and attach through TQ_CONFIG_FILE, or use SimpleStorage. A backend of your own is a StorageManager "
            "registered under this name, or of a package with the entry-point group transfer_queue.backends; packages "
            f"installed here bring: {', '.join(sorted(packaged_backends())) or 'none'}"
        )
    simple, shards = merged.backend.SimpleStorage, int(merged.controller.shards)
    if simple.total_storage_size is not None and simple.total_storage_size < shards:
        raise ConfigError(
            f"backend.SimpleStorage.total_storage_size: {simple.total_storage_size} rows are too few for "
            f"controller.shards: {shards}, which share them"
        )
    capacity = merged.backend.MooncakeStore.global_segment_size if kind == "MooncakeStore" else simple.unit_capacity
    shared = kind == "SimpleStorage" and capacity is None and not simple.ssd_offload.enabled
    sampler = sampler_choice(merged.controller.sampler)
    if sampler.name.endswith("GRPOGroupNSampler") and sampler.args.get("n_samples_per_prompt", 1) == 1:
        log.warning(
            "controller.sampler: GRPOGroupNSampler with n_samples_per_prompt 1, its default, takes each row as a "
            "group; write {name: GRPOGroupNSampler, args: {n_samples_per_prompt: N}}"
        )
    plan = default_plan(
        sampler,
        units=1 if registered else int(simple.num_data_storage_units),
        unit_capacity=cast("int", parse_bytes(capacity or defaults.STORAGE_CAPACITY)),
        polling_mode=bool(merged.controller.polling_mode),
        sample_capacity=simple.total_storage_size,
        shards=shards,
        allow_pickle=True,
    )
    metrics_port = int(merged.metrics.port) if merged.metrics.enabled else None
    controller = plan.controller.model_copy(update={"metrics_port": metrics_port})
    plan = replace(plan, controller=controller, layout=merged.layout)
    if registered:
        return _with_manager(plan, kind, merged.backend[kind])
    if packaged:
        return plan.with_backend_kind(kind).with_backend_settings(_plain_section(kind, merged.backend[kind]))
    if shared:
        plan = plan.with_memory_share()
    if kind == "SimpleStorage":
        return _with_spill(plan, simple.ssd_offload)
    plan = plan.with_backend_kind(_KINDS[kind])
    if kind == "RayStore" and (transport := _plain_section(kind, merged.backend.RayStore).get("transport")):
        return plan.with_backend_settings({"transport": transport})
    return with_mooncake(plan, merged.backend.MooncakeStore, in_ray=allow_ray) if kind == "MooncakeStore" else plan


def mooncake_plan(section: Mapping[str, Any]) -> LocalPlan:
    """Plan a queue of one storage unit on the Mooncake master of ``section``, a ``backend.MooncakeStore`` section.

    Raises ConfigError.
    """
    merged = merge_settings({"backend": {"storage_backend": "MooncakeStore", "MooncakeStore": dict(section)}})
    merged.backend.MooncakeStore.auto_init = False
    merged.backend.SimpleStorage.num_data_storage_units = 1
    return plan_queue(merged, allow_ray=True)


def _with_manager(plan: LocalPlan, name: str, section: Any) -> LocalPlan:
    """One storage unit, which keeps the account of what lies in the manager's store."""
    plain = _plain_section(name, section)
    try:
        capacity = cast("int", parse_bytes(plain.get("unit_capacity", _UNLIMITED)))
    except ValueError as error:
        raise ConfigError(f"backend.{name}.unit_capacity: {error}") from None
    units = tuple(unit.model_copy(update={"capacity": capacity}) for unit in plan.units)
    plan = replace(plan, units=units).with_backend_kind("registered")
    return plan.with_backend_settings({"manager": name, "section": plain})


def _plain_section(name: str, section: Any) -> dict[str, Any]:
    """Settings of a backend that only its own code knows."""
    where = f"backend.{name}"
    plain = OmegaConf.to_container(section, resolve=True) if isinstance(section, DictConfig) else (section or {})
    if not isinstance(plain, dict):
        raise ConfigError(wrong_type(where, plain))
    try:
        msgspec.json.encode(plain)
    except TypeError as error:
        raise ConfigError(f"{where}: other processes get these settings too, so they must be plain: {error}") from None
    return cast("dict[str, Any]", plain)


def _with_spill(plan: LocalPlan, section: Any) -> LocalPlan:
    if not section.enabled:
        return plan
    if not section.path:
        raise ConfigError("backend.SimpleStorage.ssd_offload.path: name a folder on a local disk")
    offload = {
        "enabled": True,
        "path": os.path.abspath(section.path),
        "thresholdBytes": section.threshold_bytes,
        "glibcMmapThresholdBytes": section.glibc_mmap_threshold_bytes,
    }
    return plan.with_backend_settings({"ssdOffload": offload})


def merge_settings(conf: DictConfig | Mapping[str, Any] | None, *, in_ray: bool = False) -> DictConfig:
    """``conf`` over the packaged ``config.yaml``. ``in_ray``: for a queue of a Ray cluster.

    Raises ConfigError for a setting that cannot be.
    """
    flags = {"allow_objects": True}
    packaged = importlib.resources.files("transfer_queue").joinpath("config.yaml").read_text()
    defaults = cast("DictConfig", OmegaConf.create(packaged, flags=flags))
    given = conf if isinstance(conf, DictConfig) else OmegaConf.create(dict(conf or {}), flags=flags)
    check_settings(_plain(given), _plain(defaults), in_ray=in_ray)
    merged = cast("DictConfig", OmegaConf.merge(defaults, given))
    _fill_sections(merged, defaults)
    ray_settings(merged)
    return merged


def _fill_sections(merged: DictConfig, defaults: DictConfig) -> None:
    """A section that was left empty, as YAML has it, is that of the defaults."""
    for name, section in defaults.items():
        if isinstance(section, DictConfig):
            if merged[name] is None:
                merged[name] = section
            else:
                _fill_sections(merged[name], section)


def ray_settings(merged: DictConfig) -> RaySettings:
    """The section ``ray``. Raises ConfigError naming the field."""
    section = {} if merged.ray is None else OmegaConf.to_container(merged.ray, resolve=True)
    return validate_document(RaySettings, section, "ray")


def _plain(conf: object) -> dict[str, Any]:
    return cast("dict[str, Any]", OmegaConf.to_container(cast("DictConfig", conf), resolve=True))


def _with_addresses(merged: DictConfig, stack: LocalStack) -> DictConfig:
    """``merged`` with what another process needs to attach: addresses, and whether values may be pickled."""
    attach = stack.attach_config
    controller, units = stack.processes[0], stack.processes[stack.plan.shards :]
    with open_dict(merged):
        merged.controller.zmq_info = server_info(
            Role.CONTROLLER, controller.name, stack.controller_address, attach.security.secret
        )
        merged.backend.SimpleStorage.zmq_info = {
            unit.name: server_info(Role.STORAGE, unit.name, unit.address["address"])
            for unit in units
            if unit.address["address"]
        }
        merged.security = {"allowPickle": attach.security.allow_pickle}
        if controller.address["metrics"]:
            merged.metrics.endpoint = controller.address["metrics"]
    return merged


def sampler_choice(given: object) -> SamplerChoice:
    """Convert a name, class, instance or ``{name, args}`` to a choice that the controller's process can instantiate.

    A class that no module has by its name, as those of ``__main__`` and of notebooks, goes there pickled by value, and
    so does an instance of it. Raises ConfigError, InvalidTypeError.
    """
    if isinstance(given, DictConfig):
        given = OmegaConf.to_container(given, resolve=True)
    if isinstance(given, dict):
        choice = validate_document(SamplerChoice, given, "controller.sampler")
        return choice.model_copy(update={"name": sampler_choice(choice.name).name})
    if isinstance(given, str):
        if ":" not in given and given not in transfer_queue.sampler.__all__:
            raise ConfigError(f"controller.sampler: Could not find sampler {given!r}; or write package.module:Class")
        return SamplerChoice(name=given)
    kind = given if isinstance(given, type) else type(given)
    if not issubclass(kind, BaseSampler):
        raise InvalidTypeError(f"controller.sampler must be a sampler, its class or its name, not {kind.__name__}")
    name = f"{kind.__module__}:{kind.__qualname__}"
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        return SamplerChoice(name=name, pickled=_pickled(given, kind))
    arguments = {}
    if not isinstance(given, type):
        for parameter in inspect.signature(kind).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if not hasattr(given, parameter.name):
                raise ConfigError(
                    f"controller.sampler: {kind.__name__} must keep its argument {parameter.name} as an attribute"
                )
            arguments[parameter.name] = getattr(given, parameter.name)
    return SamplerChoice(name=name, args=arguments)


def _pickled(sampler: object, kind: type) -> str:
    import cloudpickle

    try:
        return base64.b64encode(cloudpickle.dumps(sampler)).decode()
    except Exception as error:  # boundary: a user's class
        raise ConfigError(
            f"controller.sampler: {kind.__qualname__} cannot be pickled for the controller ({error}); "
            "keep locks, connections and open files out of it, or define it at the top of an importable module"
        ) from error
