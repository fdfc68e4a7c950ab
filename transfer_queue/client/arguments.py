"""Checks of callers' arguments: a wrong one is refused here, by its name, before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from transfer_queue._kv_meta import whole_number
from transfer_queue.columns.kinds import is_kind
from transfer_queue.control.plain import pack_arrays
from transfer_queue.errors import InvalidInputError, InvalidTypeError
from transfer_queue.wire.messages import ENCODER

if TYPE_CHECKING:
    import torch

    from transfer_queue.metadata import BatchMeta

__all__ = [
    "check_count",
    "check_data",
    "check_fields",
    "check_flag",
    "check_keys",
    "check_lease",
    "check_mapping",
    "check_metadata",
    "check_name",
    "check_params",
    "check_partition",
    "check_placement",
    "check_seconds",
    "check_tags",
    "check_text",
]

T = TypeVar("T")


def check_text(name: str, value: object) -> str:
    """A string that UTF-8 can carry, which a lone surrogate is not."""
    if not isinstance(value, str):
        raise InvalidTypeError(f"{name} must be a string, not {type(value).__name__}")
    return _encodable(name, value)


def check_name(name: str, value: object) -> str:
    """A string that is not empty."""
    text = check_text(name, value)
    if not text:
        raise InvalidInputError(f"{name} must not be empty")
    return text


def check_partition(partition_id: object) -> str:
    """Check the name of a partition: a string that is not empty."""
    return check_name("partition_id", partition_id)


def check_placement(placement: object) -> torch.device | None:
    """The GPU of a put that is to stay there, if none of its tensors is on one: the current one of this thread.

    Raises InvalidTypeError; InvalidInputError for another word, and where there is no GPU.
    """
    if placement in (None, "host"):
        return None
    if not isinstance(placement, str):
        raise InvalidTypeError(f"placement must be 'host' or 'device', not {type(placement).__name__}")
    if placement != "device":
        raise InvalidInputError(f"placement must be 'host' or 'device', not {placement!r}")
    import torch

    if not torch.cuda.is_available():
        raise InvalidInputError(
            "placement 'device': torch finds no CUDA device here; leave placement out, or install a CUDA build of "
            "torch on a machine with a GPU"
        )
    return torch.device("cuda", torch.cuda.current_device())


def check_keys(keys: object) -> list[str]:
    """A non-empty list of strings that are not empty."""
    if not isinstance(keys, list):
        raise InvalidTypeError(f"keys must be a list of strings, not {type(keys).__name__}")
    for kind in {*map(type, keys)}:
        if not issubclass(kind, str):
            raise InvalidTypeError(f"keys must be strings, not {kind.__name__}")
    if not keys:
        raise InvalidInputError("keys is an empty list")
    if "" in keys:
        raise InvalidInputError("keys must not be empty: rows of an unset variable would overwrite each other")
    joined = "".join(keys)
    if not joined.isascii():
        _encodable("keys", joined)
    return keys


def check_fields(name: str, value: object) -> list[str]:
    """A list of field names; a bare string would pass for a list of its letters."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidTypeError(f"{name} must be a list of strings, not {type(value).__name__}")
    for field in value:
        if not isinstance(field, str):
            raise InvalidTypeError(f"{name} must be a list of strings, not of {type(field).__name__}")
        if not field:
            raise InvalidInputError(f"{name} holds an empty name")
    return _encodable(name, list(value))


def check_tags(name: str, tags: object, count: int, what: str) -> list[dict[str, Any]]:
    """A dict for each of ``count`` keys or rows, as ``what`` says, of values that msgpack can carry."""
    if not isinstance(tags, list) or not all(isinstance(tag, dict) for tag in tags):
        raise InvalidTypeError(f"{name} must be a list of dicts, one for each of the {what}")
    if len(tags) != count:
        raise InvalidInputError(f"{len(tags)} {name} given, which does not match {count} {what}")
    for tag in tags:
        check_mapping(name, tag)
    return tags


def check_mapping(name: str, value: object) -> dict[str, Any]:
    """A dict from strings to values that msgpack can carry."""
    if not isinstance(value, dict):
        raise InvalidTypeError(f"{name} must be a dict, not {type(value).__name__}")
    for key in value:
        if not isinstance(key, str):
            raise InvalidTypeError(f"{name} must have strings as names, not {type(key).__name__}")
    return _encodable(name, value)


def check_params(name: str, value: object) -> dict[str, Any]:
    """Like `check_mapping`, but values may also be arrays."""
    return check_mapping(name, pack_arrays(value) if isinstance(value, dict) else value)


def check_count(name: str, value: object) -> int:
    """A whole number, numpy's too, from 0 on."""
    count = whole_number(name, value)
    if not 0 <= count < 2**63:
        raise InvalidInputError(f"{name} must be from 0 to 2**63 - 1, not {count}")
    return count


def check_seconds(name: str, value: object) -> float:
    """A time from 0 on."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    if not value >= 0:  # nan is not
        raise InvalidInputError(f"{name} must be 0 or more seconds, not {value}")
    return min(float(value), 1e9) if value < 2**63 else 1e9


def check_lease(name: str, value: object) -> float | None:
    """Seconds, infinity too, or None for the queue's default."""
    if value is None or value == math.inf:
        return None if value is None else math.inf
    return check_seconds(name, value)


def check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be True or False, not {type(value).__name__}")
    return value


def check_data(name: str, value: object) -> Any:
    """A TensorDict, or a mapping of columns."""
    if not is_kind(value, "TensorDictBase") and not isinstance(value, Mapping):
        raise InvalidTypeError(f"{name} must be a TensorDict or a dict of columns, not {type(value).__name__}")
    return value


def check_metadata(metadata: object) -> BatchMeta:
    from transfer_queue.metadata import BatchMeta

    if not isinstance(metadata, BatchMeta):
        advice = "; read a KVBatchMeta with kv_batch_get_by_meta" if type(metadata).__name__ == "KVBatchMeta" else ""
        raise InvalidTypeError(f"metadata must be a BatchMeta, not {type(metadata).__name__}{advice}")
    try:
        metadata._check_lengths()
    except InvalidInputError as error:  # its lists may have been changed since it was made
        raise InvalidInputError(f"metadata: {error}") from None
    return metadata


def _encodable(name: str, value: T) -> T:
    try:
        ENCODER.encode(value)
    except InvalidTypeError as error:
        raise InvalidTypeError(f"{name}: {error}") from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInputError(f"{name} holds a value that cannot be sent: {error}") from None
    return value
