"""The key-value interface and the life of a process's client, as module functions.

The first call attaches to the queue that ``TQ_CONFIG_FILE`` or ``TQ_CONTROLLER_ADDRESS`` names, if ``init`` was not
called. Each function has an ``async_`` twin that may be awaited from any event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transfer_queue._kv_meta import KVBatchMeta
from transfer_queue.client.client import Device, Out
from transfer_queue.client.lifecycle import close, current_client, get_client, init
from transfer_queue.client.parser import DataParser
from transfer_queue.compat.paths import legacy_attribute
from transfer_queue.errors import ConnectionLostError, NotInitializedError

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
]

Tag = dict[str, Any]

if not TYPE_CHECKING:  # with it, a misspelt name would pass for one of type Any

    def __getattr__(name: str) -> Any:
        """``save_checkpoint`` and ``load_checkpoint``, which 0.1.x has here too."""
        return legacy_attribute(__name__, name)


def get_metrics_endpoint() -> str | None:
    """``"host:port"`` where the controller serves ``/metrics`` over HTTP.

    Attaches as the key-value functions do. None if the controller serves none, or there is no queue or controller.
    """
    try:
        return current_client().metrics_endpoint
    except (ConnectionLostError, NotInitializedError):
        return None


def kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: Tag | None = None,
    data_parser: DataParser | None = None,
) -> KVBatchMeta:
    """Create or update one row.

    ``fields``: a dict (a tensor is the row's tensor, anything else an opaque value) or a TensorDict of batch size
    ``[1]``; fields not given stay as they are. ``tag`` is merged shallowly. Raises InvalidInputError,
    InvalidTypeError, CapacityError; then nothing changed.
    """
    client = current_client()
    return client.run(client.kv.put_one(key, partition_id, fields, tag, data_parser))


async def async_kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: Tag | None = None,
    data_parser: DataParser | None = None,
) -> KVBatchMeta:
    """See ``kv_put``."""
    client = current_client()
    return await client.async_run(client.kv.put_one(key, partition_id, fields, tag, data_parser))


def kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[Tag] | None = None,
    data_parser: DataParser | None = None,
) -> KVBatchMeta:
    """Create or update the rows of ``keys``, all or nothing; row ``i`` of ``fields`` belongs to ``keys[i]``.

    Returns the keys with their merged tags and the sorted names of all fields ready for every one of them. Raises as
    ``kv_put`` does.
    """
    client = current_client()
    return client.run(client.kv.put(keys, partition_id, fields, tags, data_parser))


async def async_kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[Tag] | None = None,
    data_parser: DataParser | None = None,
) -> KVBatchMeta:
    """See ``kv_batch_put``."""
    client = current_client()
    return await client.async_run(client.kv.put(keys, partition_id, fields, tags, data_parser))


def kv_batch_get(
    keys: list[str] | str,
    partition_id: str,
    select_fields: list[str] | str | None = None,
    *,
    zero_copy: bool = False,
    out: Out | None = None,
    device: Device = None,
) -> TensorDict:
    """The rows of ``keys``, in that order, repeated where keys repeat: batch size ``[len(keys)]``.

    Without ``select_fields``: every field ready for all of them; with it, the named ones. Raises KeyNotFoundError
    naming missing keys, NotReadyError for a key without data and for a named field that some of the rows lack (with the
    setting ``missing_fields: drop`` that field is left out), StorageKeyNotFoundError for a row that vanished meanwhile,
    DataLostError.

    ``zero_copy``: tensors are views of the stored rows where a field's rows lie together in one put, on the same host;
    else copies. A view must not be written to: it is the stored row, for every reader. Its memory stays in use, though
    the rows be cleared or overwritten, until the last tensor that refers to it is gone: who holds views for long takes
    room from the queue's writers and from nobody's reads.
    ``out``: a TensorDict or mapping with a tensor for every returned field, which is filled and returned: of shape
    ``(len(keys), ...)``, or jagged with the rows' lengths, of the field's dtype, on any device. All fields are checked
    before one is written; InvalidInputError names the field that does not fit.
    ``device``: ``"cpu"`` or a CUDA device the tensors are to lie on, copied there on the caller's current stream and
    complete on return. InvalidInputError where torch finds no such device.
    """
    client = current_client()
    return client.run(client.kv.get(keys, partition_id, select_fields, zero_copy=zero_copy, out=out, device=device))


async def async_kv_batch_get(
    keys: list[str] | str,
    partition_id: str,
    select_fields: list[str] | str | None = None,
    *,
    zero_copy: bool = False,
    out: Out | None = None,
    device: Device = None,
) -> TensorDict:
    """See ``kv_batch_get``."""
    client = current_client()
    return await client.async_run(
        client.kv.get(keys, partition_id, select_fields, zero_copy=zero_copy, out=out, device=device)
    )


def kv_batch_get_by_meta(
    meta: KVBatchMeta,
    select_fields: list[str] | str | None = None,
    *,
    zero_copy: bool = False,
    out: Out | None = None,
    device: Device = None,
) -> TensorDict:
    """The rows of ``meta``: its ``fields``, or ``select_fields``, which must be among them.

    Raises InvalidInputError for a meta without partition and for fields it does not have; else as ``kv_batch_get``.
    """
    client = current_client()
    return client.run(client.kv.get_by_meta(meta, select_fields, zero_copy=zero_copy, out=out, device=device))


async def async_kv_batch_get_by_meta(
    meta: KVBatchMeta,
    select_fields: list[str] | str | None = None,
    *,
    zero_copy: bool = False,
    out: Out | None = None,
    device: Device = None,
) -> TensorDict:
    """See ``kv_batch_get_by_meta``."""
    client = current_client()
    return await client.async_run(
        client.kv.get_by_meta(meta, select_fields, zero_copy=zero_copy, out=out, device=device)
    )


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
    """``{partition: {key: tag}}`` of one partition, or of all; keys in the order of their first put.

    An unknown partition gives ``{}``. Raises InvalidTypeError.
    """
    client = current_client()
    return client.run(client.kv.list_keys(partition_id))


async def async_kv_list(partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
    """See ``kv_list``."""
    client = current_client()
    return await client.async_run(client.kv.list_keys(partition_id))


def kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """Forget rows and free their storage; missing keys and partitions are ignored.

    Raises InvalidTypeError, InvalidInputError for an empty list.
    """
    client = current_client()
    client.run(client.kv.clear(keys, partition_id))


async def async_kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """See ``kv_clear``."""
    client = current_client()
    await client.async_run(client.kv.clear(keys, partition_id))
