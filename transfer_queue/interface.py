"""The key-value interface and the life of a process's client, as module functions.

The first call attaches to the queue that ``TQ_CONFIG_FILE`` or ``TQ_CONTROLLER_ADDRESS`` names, if ``init`` was not
called. Each function has an ``async_`` twin that may be awaited from any event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from transfer_queue._kv_meta import KVBatchMeta
from transfer_queue.client.client import Device, Layout, Out
from transfer_queue.client.parser import DataParser
from transfer_queue.client.read_options import ReadOptions
from transfer_queue.client.status import QueueStatus, look
from transfer_queue.client.twins import blocking
from transfer_queue.compat.paths import legacy_attribute
from transfer_queue.errors import ConnectionLostError, NotInitializedError
from transfer_queue.lifecycle import close, current_client, get_client, init

if TYPE_CHECKING:
    from tensordict import TensorDict

    from transfer_queue.client.locks import GlobalLock

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
    "status",
]

Tag = dict[str, Any]

if not TYPE_CHECKING:  # type checkers would accept any misspelt name

    def __getattr__(name: str) -> Any:
        """``save_checkpoint`` and ``load_checkpoint``, as in 0.1.x."""
        return legacy_attribute(__name__, name)


def get_metrics_endpoint() -> str | None:
    """Return the address at which the controller serves ``/metrics`` over HTTP.

    The first call attaches to the queue of the environment, like the key-value functions.

    Returns:
        ``"host:port"``. None if the controller serves no metrics, or if there is no queue or controller.

    Raises:
        ConfigError: The environment names a queue wrongly.
    """
    try:
        return current_client().metrics_endpoint
    except (ConnectionLostError, NotInitializedError):
        return None


def status() -> QueueStatus:
    """What the queue holds, how much of it is ready, and what requests wait for.

    Notebooks show it as a table with bars, terminals as text. A queue with access policies shows it to administrators.

    Returns:
        The state at this moment; call again for a newer one.

    Raises:
        ConnectionLostError: The controller cannot be reached.
        NotAuthorizedError: The access policy does not allow this client to see the whole queue.

    Example:
        >>> tq.status()
        default: 64 rows, 1 partitions, 3 clients, 2 of 2 storage units
          train_7: 64 rows; tokens 64/64, reward 32/64
        task 'trainer' has waited 41 s for 64 rows of 'train_7': 32 are ready, 'reward' is missing on 32 of 64
    """
    client = current_client()
    return client.run(lambda: look(client.engine))


async def async_kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: Tag | None = None,
    data_parser: DataParser | None = None,
    *,
    lock: GlobalLock | None = None,
    placement: Literal["host", "device"] | None = None,
) -> KVBatchMeta:
    """Create or update one row.

    Args:
        key: The row's key.
        partition_id: The partition, made with its first row.
        fields: A dict, whose tensors are the row's tensors and whose other values are opaque, or a TensorDict of batch
            size ``[1]``. Other fields of the row do not change.
        tag: Merged shallowly into the row's tag.
        data_parser: Gets the fields as columns and returns the same fields.
        lock: What ``kv_global_lock`` gave. The put is refused if this lock has ended.
        placement: ``host`` or None: storage units of the host. ``device``: the fields stay on this process's GPU while
            it has room and this process lives; readers copy them from there. Refused without a CUDA device, with
            another backend than simple, or with several controllers.

    Returns:
        The key with its merged tag, and the sorted names of the fields that are ready.

    Raises:
        InvalidInputError, InvalidTypeError: An argument is wrong; then nothing changed.
        CapacityError: There was no room in time; then nothing changed.
        LockLostError: ``lock`` has ended; then nothing changed.

    Example:
        >>> meta = await tq.async_kv_put("a", "train", {"tokens": torch.arange(7)}, tag={"status": "finished"})
    """
    client = current_client()
    return await client.async_run(client.kv.put_one, key, partition_id, fields, tag, data_parser, lock, placement)


kv_put = blocking(async_kv_put)


async def async_kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tags: list[Tag] | None = None,
    data_parser: DataParser | None = None,
    *,
    lock: GlobalLock | None = None,
    placement: Literal["host", "device"] | None = None,
) -> KVBatchMeta:
    """Create or update the rows of ``keys``, all or nothing.

    Args:
        keys: Keys of rows, each once.
        partition_id: The partition, made with its first row.
        fields: A TensorDict of batch size ``[len(keys)]``, or a dict of tensors and lists of that length; row ``i``
            belongs to ``keys[i]``.
        tags: A dict for each key, merged shallowly into the row's tag.
        data_parser: Gets ``{field: dense tensor or list of rows}`` and returns the same fields with as many rows.
        lock: What ``kv_global_lock`` gave. The put is refused if this lock has ended.
        placement: ``host`` or None: storage units of the host. ``device``: the fields stay on this process's GPU while
            it has room and this process lives; readers copy them from there. Refused without a CUDA device, with
            another backend than simple, or with several controllers.

    Returns:
        The keys with their merged tags and the sorted names of all fields ready for every one of them.

    Raises:
        InvalidInputError, InvalidTypeError: An argument is wrong; then nothing changed.
        CapacityError: There was no room in time; then nothing changed.
        LockLostError: ``lock`` has ended; then nothing changed.

    Example:
        >>> rows = TensorDict({"tokens": torch.ones(2, 7), "reward": torch.zeros(2)}, batch_size=[2])
        >>> meta = await tq.async_kv_batch_put(["a", "b"], "train", rows)
        >>> meta.fields
        ['reward', 'tokens']
    """
    client = current_client()
    return await client.async_run(client.kv.put, keys, partition_id, fields, tags, data_parser, lock, placement)


kv_batch_put = blocking(async_kv_batch_put)


async def async_kv_batch_get(
    keys: list[str] | str,
    partition_id: str,
    select_fields: list[str] | str | None = None,
    *,
    zero_copy: bool = False,
    out: Out | None = None,
    device: Device = None,
    layout: Layout | None = None,
) -> TensorDict:
    """Return the rows of ``keys``, in this order, repeated where keys repeat.

    Args:
        keys: Keys of rows, or one key.
        partition_id: The partition.
        select_fields: The fields to read. None: every field that the rows have.
        zero_copy: Return views of the stored rows where a field's rows lie together in one put, on the same host, and
            copies elsewhere. Do not write to a view: it is the stored row of every reader. Its memory stays in use,
            even after the rows are cleared or overwritten, until the last tensor that refers to it is freed. Views that
            are held for long reduce the room for writers, but do not affect readers.
        out: A TensorDict or mapping with a tensor for every returned field, which is filled and returned. Its shape is
            ``(len(keys), ...)``, or jagged with the rows' lengths; it has the field's dtype and may be on any device.
            All fields are checked before the first is written.
        device: ``"cpu"`` or a CUDA device for the tensors. They are copied on the caller's current stream, and the
            copies are complete on return.
        layout: ``"dense"``: uniform rows as one dense tensor. ``"jagged"``: fields of two or more dimensions as nested
            tensors. None: the layout of the client's settings, jagged by default.

    Returns:
        A TensorDict of batch size ``[len(keys)]``.

    Raises:
        KeyNotFoundError: Keys are not in the partition; the message names them.
        NotReadyError: A key has no data, or some of the rows lack a named field, or without names a field that other
            rows have. With the setting ``missing_fields: drop`` such a field is left out.
        InvalidInputError: A field does not fit ``out``, or torch does not find the device.
        StorageKeyNotFoundError: A row was removed during the read.
        DataLostError: Rows were lost with their storage unit.

    Example:
        >>> rows = TensorDict({"tokens": torch.ones(2, 7), "reward": torch.zeros(2)}, batch_size=[2])
        >>> meta = await tq.async_kv_batch_put(["a", "b"], "train", rows)
        >>> batch = await tq.async_kv_batch_get(["b", "a"], "train", ["tokens"], layout="dense")
        >>> batch["tokens"].shape
        torch.Size([2, 7])
    """
    client = current_client()
    options = ReadOptions(zero_copy, out, device, layout)
    return await client.async_run(client.kv.get, keys, partition_id, select_fields, options)


kv_batch_get = blocking(async_kv_batch_get)


async def async_kv_batch_get_by_meta(
    meta: KVBatchMeta,
    select_fields: list[str] | str | None = None,
    *,
    zero_copy: bool = False,
    out: Out | None = None,
    device: Device = None,
    layout: Layout | None = None,
) -> TensorDict:
    """Return the rows of ``meta``.

    Args:
        meta: The rows, as a put by key returned them.
        select_fields: The fields to read, among those of ``meta``. None: all of its fields.
        zero_copy: As for ``async_kv_batch_get``.
        out: As for ``async_kv_batch_get``.
        device: As for ``async_kv_batch_get``.
        layout: As for ``async_kv_batch_get``.

    Returns:
        A TensorDict of batch size ``[len(meta.keys)]``.

    Raises:
        InvalidInputError: ``meta`` has no partition, or lacks a named field. Other errors are the same as for
            ``async_kv_batch_get``.

    Example:
        >>> meta = await tq.async_kv_put("c", "train", {"tokens": torch.ones(7), "reward": torch.tensor(1.0)})
        >>> batch = await tq.async_kv_batch_get_by_meta(meta, select_fields="reward")
    """
    client = current_client()
    options = ReadOptions(zero_copy, out, device, layout)
    return await client.async_run(client.kv.get_by_meta, meta, select_fields, options)


kv_batch_get_by_meta = blocking(async_kv_batch_get_by_meta)


async def async_kv_list(partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
    """Return the keys and tags of one partition, or of all partitions.

    Args:
        partition_id: The partition. None: all partitions.

    Returns:
        ``{partition: {key: tag}}``, keys in the order of their first put; ``{}`` for an unknown partition, of which the
        first call logs a warning that names those that exist.

    Raises:
        InvalidTypeError: ``partition_id`` is not a string.

    Example:
        >>> meta = await tq.async_kv_put("a", "train", tag={"status": "finished"})
        >>> listed = await tq.async_kv_list("train")
        >>> finished = [key for key, tag in listed["train"].items() if tag.get("status") == "finished"]
    """
    client = current_client()
    return await client.async_run(client.kv.list_keys, partition_id)


kv_list = blocking(async_kv_list)


async def async_kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """Forget rows and free their storage.

    Args:
        keys: Keys of rows, or one key. The first call with missing keys logs a warning.
        partition_id: The partition. The first call with an unknown one logs a warning that names those that exist.

    Raises:
        InvalidTypeError: A key is not a string.
        InvalidInputError: ``keys`` is an empty list.

    Example:
        >>> await tq.async_kv_clear(["a", "b"], "train")
    """
    client = current_client()
    await client.async_run(client.kv.clear, keys, partition_id)


kv_clear = blocking(async_kv_clear)
