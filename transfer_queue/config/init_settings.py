"""The settings of ``init(conf)``: each takes effect or is refused; the log names those of 0.1.x that have none."""

from __future__ import annotations

import difflib
import importlib.resources
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from transfer_queue.config.defaults import MOST_SHARDS
from transfer_queue.config.document import document_paths, explain, parse_bytes, read_yaml, wrong_type
from transfer_queue.config.processes import SMALLEST_CAPACITY
from transfer_queue.config.rules import NO_LIMIT, Between, Model
from transfer_queue.errors import ConfigError

__all__ = ["ATTACH_SETTINGS", "check_names", "check_settings", "leaves"]

log = logging.getLogger(__name__)

SIMPLE = "backend.SimpleStorage"
_ADDED = {"metrics.endpoint", "controller.addresses"}
_ADDRESSES = {"address", "addresses", "controller_address", "controller_addresses", "controller.address"}
"""What people write to attach to a queue. Without effect, another queue would be started."""
_NAMED = ("controller", "metrics", "backend")
_NEAR = 0.8
"""Similarity to the name of a setting above which a name counts as misspelt; 1: identical."""
ATTACH_SETTINGS = ("name", "uid", "layout", "missing_fields", "traces", "security")
"""Settings of a ``conf`` that names a queue, besides ``controller``."""


class _Section(Model):
    """Part of the settings; entries that are no fields are not checked here."""

    model_config = ConfigDict(alias_generator=None, extra="ignore")


@dataclass(frozen=True)
class _Only:
    """The one value that an entry may have, and why it may have no other."""

    value: bool
    reason: str

    def check(self, value: object) -> bool:
        if value is not self.value:
            raise PydanticCustomError("only", "{problem}", {"problem": self.reason})
        return self.value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)


_Positive: TypeAlias = Annotated[int, Between(1, NO_LIMIT)]
_Size: TypeAlias = Annotated[int, Between(0, NO_LIMIT)]
_Capacity: TypeAlias = Annotated[int, Between(SMALLEST_CAPACITY, NO_LIMIT), BeforeValidator(parse_bytes)]


class _Metrics(_Section):
    enabled: bool = False
    port: Annotated[int, Between(0, 65535)] = 0


class _Controller(_Section):
    polling_mode: bool = False
    shards: Annotated[int, Between(1, MOST_SHARDS)] = 1


class _SsdOffload(_Section):
    enabled: bool = False
    threshold_bytes: _Size = 0
    glibc_mmap_threshold_bytes: _Size = 0


class _Simple(_Section):
    num_data_storage_units: _Positive = 1
    total_storage_size: _Positive = 1
    unit_capacity: _Capacity = SMALLEST_CAPACITY
    ssd_offload: _SsdOffload = _SsdOffload()


class _MooncakeOffload(_Section):
    enabled: Annotated[
        bool,
        _Only(
            False,
            "is not available: the engine does not tell which unit has a block that it moved to disk; leave it false "
            "and give the store more segments, or use SimpleStorage with ssd_offload",
        ),
    ] = False


class _Mooncake(_Section):
    auto_init: bool = True
    global_segment_size: _Capacity = SMALLEST_CAPACITY
    offload: _MooncakeOffload = _MooncakeOffload()
    use_gdr: Annotated[
        bool,
        _Only(
            False,
            "is not available: rows pass through buffers of the host; leave it false, or use SimpleStorage, which "
            "takes tensors of GPUs by pinned memory (docs/gpu.md)",
        ),
    ] = False
    hard_pin: Annotated[bool, _Only(True, "cannot be false: unread rows are never evicted")] = True


class _RayStore(_Section):
    transport: Literal["object_store", "transferqueue", "nixl", "cuda_ipc"] = "object_store"


class _Backend(_Section):
    simple: _Simple = Field(default=_Simple(), alias="SimpleStorage")
    mooncake: _Mooncake = Field(default=_Mooncake(), alias="MooncakeStore")
    ray: _RayStore = Field(default=_RayStore(), alias="RayStore")


class _Settings(_Section):
    """The entries of ``config.yaml`` whose values are checked. Defaults are in that file."""

    layout: Literal["jagged", "dense"] = "jagged"
    missing_fields: Literal["error", "drop"] = "error"
    metrics: _Metrics = _Metrics()
    controller: _Controller = _Controller()
    backend: _Backend = _Backend()


_WITHOUT_EFFECT = {
    f"{SIMPLE}.required_node_resource": "the storage units of a queue on one machine all run on this node",
    f"{SIMPLE}.zmq_info": "it is filled in with the units that are started",
    f"{SIMPLE}.storage_unit_infos": "the units are those that are started",
}


_EARLIER = frozenset(
    {
        "enable",
        "backend.MooncakeStore.client_name",
        "backend.Yuanrong.client_name",
        "backend.Yuanrong.etcd_address",
        "backend.Yuanrong.host",
        "backend.Yuanrong.port",
    }
)
"""Settings of configurations for 0.1.x that ``config.yaml`` lacks. They have no effect, and the log says so."""
_INIT_NAMES = {
    "spec.storage.replicas": f"{SIMPLE}.num_data_storage_units",
    "spec.storage.capacity": f"{SIMPLE}.unit_capacity",
    "spec.controller.sampleCapacity": f"{SIMPLE}.total_storage_size",
    "spec.controller.metricsPort": "metrics.port",
    "spec.backend.simple": 'backend.storage_backend: "SimpleStorage"',
    "spec.backend.mooncake": 'backend.storage_backend: "MooncakeStore"',
    "spec.backend.ray": 'backend.storage_backend: "RayStore"',
}
"""Settings of ``init`` that have another name than in a resource."""


def check_names(given: Mapping[str, Any], is_backend: Callable[[str], bool], *, attaches: bool = False) -> None:
    """Refuse settings without effect, with where they belong.

    ``is_backend``: whether a package or the program brings a backend of this name, which has a section of its own.
    ``attaches``: ``given`` names a queue, with ``ATTACH_SETTINGS`` about it. Raises ConfigError.
    """
    if "spec" in given and ("kind" in given or "apiVersion" in given):
        raise ConfigError(
            "conf is a whole TransferQueue resource, and init() takes settings as in config.yaml: start the resource "
            "with tq up -f FILE (or kubectl apply -f FILE) and call init() without it"
        )
    _check_names(given, {**_packaged(), **dict.fromkeys(ATTACH_SETTINGS if attaches else ("traces",))}, "", is_backend)


def _check_names(
    given: Mapping[str, Any], known: Mapping[str, Any], prefix: str, is_backend: Callable[[str], bool]
) -> None:
    for name, value in given.items():
        path = f"{prefix}{name}"
        section = known.get(name)
        if isinstance(section, Mapping) and section and isinstance(value, Mapping) and path.startswith(_NAMED):
            _check_names(value, section, f"{path}.", is_backend)
        if path in _ADDRESSES:
            raise ConfigError(f'{path}: unknown setting; controller.addresses names a queue: ["host:port"]')
        if name in known or path in {*_ADDED, *_EARLIER, *_WITHOUT_EFFECT}:
            continue
        if name in ATTACH_SETTINGS and not prefix and value is None:
            continue
        if prefix == "backend." and (name == given.get("storage_backend") or is_backend(str(name))):
            continue
        near = difflib.get_close_matches(str(name), [str(other) for other in known if other not in given], 1, _NEAR)
        if near:
            raise ConfigError(f"{path}: unknown setting; did you mean {prefix}{near[0]}?")
        elsewhere = _elsewhere(next(leaves({path: value}))[0])
        raise ConfigError(elsewhere or f"{path}: unknown setting; there are: {', '.join(sorted(map(str, known)))}")


def _elsewhere(path: str) -> str:
    """The error that says where ``path``, no setting of ``init``, belongs; empty if it is no setting at all."""
    from transfer_queue.config.resource import TransferQueue  # only for the message: slow to import

    last = path.rpartition(".")[2]
    of_init = dict(_sections(_packaged()))
    of_resource = list(document_paths(TransferQueue))
    there = [other for other in of_resource if _is_same(other, path) or _is_same(other, f"spec.{path}")]
    if path.partition(".")[0] in ATTACH_SETTINGS:
        attach = f"{path}: has no effect without controller.addresses, which name a queue that is running"
        return attach + (f"; for a new queue it is {there[0]} of its resource (tq up -f FILE)" if there else "")
    if not there and (here := _named(last, of_init)):
        return f"{path}: no setting of init(), where it is {' or '.join(here)}"
    there = there or _named(last, of_resource)
    if not there:
        return ""
    ours = [_INIT_NAMES.get(other) or other.removeprefix("spec.") for other in there]
    ours = [name for name in ours if name in {*of_init, *_INIT_NAMES.values()}]
    hint = f"; init() has {' or '.join(ours)}" if ours else ""
    return f"{path}: no setting of init(); it is {' or '.join(there)} of a TransferQueue resource (tq up -f FILE){hint}"


def _named(last: str, paths: Iterable[str]) -> list[str]:
    """At most three of ``paths`` that end with the name ``last``."""
    return [path for path in paths if _is_same(path.rpartition(".")[2], last)][:3]


def _is_same(one: str, other: str) -> bool:
    return one.replace("_", "").casefold() == other.replace("_", "").casefold()


def _packaged() -> dict[str, Any]:
    text = importlib.resources.files("transfer_queue").joinpath("config.yaml").read_text()
    known: dict[str, Any] = read_yaml(text, "mapping of settings").value
    known["backend"]["RayStore"] = dict.fromkeys(_RayStore.model_fields)
    return known


def _sections(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of all sections and settings."""
    for name, value in settings.items():
        yield f"{prefix}{name}", value
        if isinstance(value, Mapping):
            yield from _sections(value, f"{prefix}{name}.")


def check_settings(given: Mapping[str, Any], known: Mapping[str, Any], *, in_ray: bool = False) -> None:
    """Look at what a caller set. ``known``: the packaged defaults, which name every entry there is. ``in_ray``: the
    queue is one of a Ray cluster.

    Raises ConfigError naming the entry. Warns (UserWarning) of entries without effect, or logs those of 0.1.x alone.
    """
    _check_sections(given, known)
    try:
        _Settings.model_validate(given)
    except ValidationError as error:
        raise ConfigError("; ".join(explain(_Settings, problem) for problem in error.errors())) from None
    for path, value in leaves(given):
        if value is None:
            continue
        if in_ray and path == f"{SIMPLE}.required_node_resource":
            continue
        if path in _WITHOUT_EFFECT or path.rpartition(".")[0] in _WITHOUT_EFFECT:
            reason = _WITHOUT_EFFECT.get(path) or _WITHOUT_EFFECT[path.rpartition(".")[0]]
            warnings.warn(f"conf: {path} has no effect: {reason}", stacklevel=6)
        elif path in _EARLIER:
            log.warning("conf: %s is a setting of 0.1.x and has no effect here", path)


def _check_sections(given: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> None:
    for name, section in known.items():
        value = given.get(name)
        if not isinstance(section, Mapping) or value is None:
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(wrong_type(f"{prefix}{name}", value))
        _check_sections(value, section, f"{prefix}{name}.")


def leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything that is not a section."""
    for name, value in settings.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value
