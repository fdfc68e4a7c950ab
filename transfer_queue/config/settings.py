"""The settings of ``init(conf)``: each takes effect, or is refused or warned of by its name."""

from __future__ import annotations

import difflib
import importlib.resources
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from transfer_queue.config.document import parse_bytes
from transfer_queue.config.processes import SMALLEST_CAPACITY
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


def _whole(least: int, most: int | None = None) -> Callable[[object], str]:
    def fault(value: object) -> str:
        ok = type(value) is int and value >= least and (most is None or value <= most)
        return "" if ok else f"must be a whole number from {least}" + (f" to {most}" if most is not None else " on")

    return fault


def _flag(value: object) -> str:
    return "" if isinstance(value, bool) else "must be true or false"


def _never(reason: str) -> Callable[[object], str]:
    return lambda value: "" if value is False else reason


def _capacity(value: object) -> str:
    try:
        size = parse_bytes(value)
    except ValueError as error:
        return f"is wrong: {error}"
    ok = type(size) is int and size >= SMALLEST_CAPACITY
    return "" if ok else f"must be a number of bytes from {SMALLEST_CAPACITY} on, such as 64Gi"


_CHECKS: dict[str, Callable[[object], str]] = {
    "layout": lambda value: "" if value in ("jagged", "dense") else "must be jagged or dense",
    "missing_fields": lambda value: "" if value in ("error", "drop") else "must be error or drop",
    "metrics.enabled": _flag,
    "metrics.port": _whole(0, 65535),
    "controller.polling_mode": _flag,
    f"{SIMPLE}.num_data_storage_units": _whole(1),
    f"{SIMPLE}.total_storage_size": _whole(1),
    f"{SIMPLE}.unit_capacity": _capacity,
    f"{SIMPLE}.ssd_offload.enabled": _flag,
    f"{SIMPLE}.ssd_offload.threshold_bytes": _whole(0),
    f"{SIMPLE}.ssd_offload.glibc_mmap_threshold_bytes": _whole(0),
    f"{MOONCAKE}.auto_init": _flag,
    f"{MOONCAKE}.global_segment_size": _capacity,
    f"{MOONCAKE}.offload.enabled": _never(
        "is not available: the engine does not tell which unit has a block that it moved to disk; leave it false and "
        "give the store more segments, or use SimpleStorage with ssd_offload"
    ),
    f"{MOONCAKE}.use_gdr": _never(
        "is not available: rows pass through buffers of the host; leave it false, or use SimpleStorage, which takes "
        "tensors of GPUs by pinned memory (docs/gpu.md)"
    ),
    f"{MOONCAKE}.hard_pin": lambda value: "" if value is True else "cannot be false: unread rows are never evicted",
}
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
    _check_names(given, {**yaml.safe_load(text), **dict.fromkeys(ATTACH_SETTINGS)}, "")


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
    for name, value in given.items():  # a section of its own may be the program's
        if not isinstance(value, Mapping) and name not in {*known, *ATTACH_SETTINGS, *_WITHOUT_EFFECT}:
            log.warning("conf: %s is not a setting and has no effect; there are: %s", name, ", ".join(sorted(known)))
    entries = dict(leaves(known))
    for path, value in leaves(given):
        if value is None:
            continue
        if path in _CHECKS:
            fault = _CHECKS[path](value)
            if fault:
                raise ConfigError(f"{path}: {fault}; got {value!r}")
        elif in_ray and path == f"{SIMPLE}.required_node_resource":
            continue
        elif path in _WITHOUT_EFFECT or path.rpartition(".")[0] in _WITHOUT_EFFECT:
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
            raise ConfigError(f"{prefix}{name}: expected a mapping of settings, got {value!r}")
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
