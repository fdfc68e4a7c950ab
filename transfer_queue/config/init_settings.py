"""The settings of ``init(conf)``: each takes effect, or is refused or warned of by its name."""

from __future__ import annotations

import difflib
import importlib.resources
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from transfer_queue.config.defaults import MOST_SHARDS
from transfer_queue.config.document import explain, parse_bytes, read_yaml, wrong_type
from transfer_queue.config.processes import SMALLEST_CAPACITY
from transfer_queue.config.rules import NO_LIMIT, Between, Model
from transfer_queue.errors import ConfigError

__all__ = ["ATTACH_SETTINGS", "check_names", "check_settings", "leaves"]

log = logging.getLogger(__name__)

SIMPLE = "backend.SimpleStorage"
MOONCAKE = "backend.MooncakeStore"
_IN_EFFECT = ("controller", "metrics", SIMPLE, MOONCAKE)
"""Sections whose entries are looked at; the section ``ray`` is a document of its own."""
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


def check_names(given: Mapping[str, Any]) -> None:
    """Refuse misspelt settings and whole resources.

    Other unknown names belong to the program and are kept. Raises ConfigError.
    """
    if "spec" in given and ("kind" in given or "apiVersion" in given):
        raise ConfigError(
            "conf is a whole TransferQueue resource, and init() takes settings as in config.yaml: start the resource "
            "with tq up -f FILE (or kubectl apply -f FILE) and call init() without it"
        )
    text = importlib.resources.files("transfer_queue").joinpath("config.yaml").read_text()
    packaged = read_yaml(text, "mapping of settings").value
    _check_names(given, {**packaged, **dict.fromkeys(ATTACH_SETTINGS)}, "")


def _check_names(given: Mapping[str, Any], known: Mapping[str, Any], prefix: str) -> None:
    chosen = given.get("storage_backend")
    for name, value in given.items():
        path = f"{prefix}{name}"
        section = known.get(name)
        if isinstance(section, Mapping) and isinstance(value, Mapping) and path.startswith(_NAMED):
            _check_names(value, section, f"{path}.")
        if path in _ADDRESSES:
            raise ConfigError(f'{path}: unknown setting; controller.addresses names a queue: ["host:port"]')
        if name in known or path in _ADDED or name == chosen or path in _WITHOUT_EFFECT:
            continue
        near = difflib.get_close_matches(str(name), [str(other) for other in known if other not in given], 1, _NEAR)
        if near:
            raise ConfigError(f"{path}: unknown setting; did you mean {prefix}{near[0]}?")


def check_settings(given: Mapping[str, Any], known: Mapping[str, Any], *, in_ray: bool = False) -> None:
    """Look at what a caller set. ``known``: the packaged defaults, which name every entry there is. ``in_ray``: the
    queue is one of a Ray cluster.

    Raises ConfigError naming the entry. Warns (UserWarning) of entries without effect; logs unknown ones, which are
    kept, since programs put their own there.
    """
    _check_sections(given, known)
    try:
        _Settings.model_validate(given)
    except ValidationError as error:
        raise ConfigError("; ".join(explain(_Settings, problem) for problem in error.errors())) from None
    for name, value in given.items():  # a section of its own may be the program's
        if not isinstance(value, Mapping) and name not in {*known, *ATTACH_SETTINGS, *_WITHOUT_EFFECT}:
            log.warning("conf: %s is not a setting and has no effect; there are: %s", name, ", ".join(sorted(known)))
    entries = dict(leaves(known))
    for path, value in leaves(given):
        if value is None:
            continue
        if in_ray and path == f"{SIMPLE}.required_node_resource":
            continue
        if path in _WITHOUT_EFFECT or path.rpartition(".")[0] in _WITHOUT_EFFECT:
            reason = _WITHOUT_EFFECT.get(path) or _WITHOUT_EFFECT[path.rpartition(".")[0]]
            warnings.warn(f"conf: {path} has no effect: {reason}", stacklevel=6)
        elif path.startswith(tuple(f"{section}." for section in _IN_EFFECT)) and not _is_known(path, entries):
            siblings = sorted(name for name in entries if name.rpartition(".")[0] == path.rpartition(".")[0])
            log.warning("conf: %s is not a setting and has no effect; near it there are: %s", path, ", ".join(siblings))


def _check_sections(given: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> None:
    for name, section in known.items():
        value = given.get(name)
        if not isinstance(section, Mapping) or value is None:
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(wrong_type(f"{prefix}{name}", value))
        _check_sections(value, section, f"{prefix}{name}.")


def _is_known(path: str, entries: Mapping[str, Any]) -> bool:
    return path in entries or path in _ADDED or path.startswith("controller.sampler")


def leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything that is not a section."""
    for name, value in settings.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value
