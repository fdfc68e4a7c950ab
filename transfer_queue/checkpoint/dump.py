"""Some rows of a queue, by their keys, as files and back: the directories and the blocks are those of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from transfer_queue.checkpoint.directory import CheckpointDirectory, open_directory
from transfer_queue.checkpoint.files import ROWS, BlockPlace, Manifest, Writer, check_places
from transfer_queue.checkpoint.load import WAIT_S, decoded, read_blocks, reading, windows
from transfer_queue.checkpoint.save import REQUEST_S, WINDOW_BLOCKS, client_of_this_process, writing
from transfer_queue.client.arguments import check_keys, check_partition
from transfer_queue.client.client import Client
from transfer_queue.client.operation import Operation
from transfer_queue.client.reading import LoadedBatch
from transfer_queue.control.commands import Batch, Commit, Lookup, Snapshot
from transfer_queue.errors import CheckpointError, NotReadyError, StorageKeyNotFoundError

__all__ = ["dump_data_by_key", "load_data_by_key", "read_row_index"]

T = TypeVar("T")
_ATTEMPTS = 5


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """A block in the files: these rows of the dump, in order."""

    place: BlockPlace
    rows: list[int]


class _Group(NamedTuple):
    """Rows of a window that have the same fields."""

    rows: list[int]
    names: list[str]
    loaded: LoadedBatch


class _Rows(msgspec.Struct, frozen=True):
    """``rows.msgpack``. All lists have an entry for each row."""

    partition: str
    keys: list[str]
    indexes: list[int]
    tags: list[dict[str, Any]]
    fields: list[list[str]]
    parts: list[_Part]


def dump_data_by_key(dump_dir: str | os.PathLike[str], keys: list[str] | str, partition_id: str) -> dict[str, int]:
    """Write rows of a partition to files: their keys, tags and those fields that they have.

    What other tasks have consumed, and other rows, are not written. An existing dump is replaced atomically. Each row
    is written as it was at one moment of the call; to write all of them as of the same moment, pause their writers or
    save a checkpoint.

    Args:
        dump_dir: A directory, which is made if it does not exist, or a URL that fsspec knows, as for
            ``save_checkpoint``. Only this process must see it.
        keys: Keys of the rows, or one key. A repeated key counts once.
        partition_id: The partition of the rows.

    Returns:
        Counts: ``keys``, ``rows_with_data``, ``shards`` (files of blocks) and ``bytes`` of the blocks.

    Raises:
        KeyNotFoundError: A ValueError: there is no row of one of the keys.
        CheckpointError: A file cannot be written, or the directory holds a checkpoint or something else.
        DataLostError, ConnectionLostError: A storage unit goes away.

    Example:
        >>> tq.dump_data_by_key("/shared/hard_prompts", ["7.0", "7.1"], "train")
        >>> tq.load_data_by_key("/shared/hard_prompts")  # in another queue, or after they were cleared
    """
    directory = open_directory(dump_dir)
    keys = list(dict.fromkeys(check_keys([keys] if isinstance(keys, str) else keys)))
    check_partition(partition_id)
    with writing(directory, rows=True) as writer:
        return _dump(client_of_this_process(), writer, keys, partition_id)


def load_data_by_key(dump_dir: str | os.PathLike[str]) -> dict[str, int]:
    """Put the rows of a dump into the queue, under their keys and in their partition.

    It is an ordinary put: fields and entries of tags that a row has beside those of the dump stay, rows that are not in
    the dump are left alone, new rows have been consumed by nobody. After an error some rows may have been put; loading
    again puts all of them.

    Warning:
        Python objects in rows are pickled, and a reader of such a row runs what the pickle says. Load only files that
        you trust, or load them into a queue with ``security.allowPickle: false``.

    Args:
        dump_dir: What was given to ``dump_data_by_key``.

    Returns:
        The counts of ``dump_data_by_key``.

    Raises:
        CheckpointNotFoundError: A FileNotFoundError: there is no complete dump.
        CorruptCheckpointError: A file is damaged; the message names it.
        CheckpointError: It is a checkpoint of a whole queue.
        CapacityError: The storage units have too little room.

    Example:
        >>> tq.load_data_by_key("/shared/hard_prompts")["keys"]
        2
    """
    directory = open_directory(dump_dir)
    client = client_of_this_process()
    with reading(directory) as manifest:
        rows = _read_rows(directory, manifest)
        written = {part.place: part.rows for part in rows.parts}
        for window in windows([part.place for part in rows.parts]):
            for place, block in zip(window, read_blocks(directory, manifest, window), strict=True):
                _run(client, client.engine.put(block, _commit(rows, written[place]), timeout_s=REQUEST_S))
        if bare := [row for row, fields in enumerate(rows.fields) if not fields]:
            _run(client, client.engine.put(None, _commit(rows, bare), timeout_s=REQUEST_S))
    return _counts(rows)


def _commit(rows: _Rows, numbers: list[int]) -> Commit:
    """Of these rows with their tags, so that nobody gets one without."""
    keys, tags = [rows.keys[row] for row in numbers], [rows.tags[row] for row in numbers]
    return Commit(rows.partition, keys=keys, tags=tags, wait_s=WAIT_S)


def read_row_index(dump_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Which rows a dump has, without reading their data. Needs no queue.

    Args:
        dump_dir: What was given to ``dump_data_by_key``.

    Returns:
        ``partition_id`` and ``rows``: key -> ``global_index`` (in the queue that wrote it), ``fields`` and ``tag``.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, CheckpointError: The same as for ``load_data_by_key``.

    Example:
        >>> tq.read_row_index("/shared/hard_prompts")["rows"]["7.0"]["fields"]
        ['answer', 'reward']
    """
    directory = open_directory(dump_dir)
    with reading(directory) as manifest:
        rows = _read_rows(directory, manifest)
    about = zip(rows.keys, rows.indexes, rows.fields, rows.tags, strict=True)
    found = {key: {"global_index": index, "fields": names, "tag": tag} for key, index, names, tag in about}
    return {"partition_id": rows.partition, "rows": found}


def _dump(client: Client, writer: Writer, keys: list[str], partition: str) -> dict[str, int]:
    found = _Rows(partition, keys, [], [], [], [])
    for start in range(0, len(keys), WINDOW_BLOCKS):
        window = keys[start : start + WINDOW_BLOCKS]
        batch, groups = _run(client, _load(client, window, partition))
        indexes = np.frombuffer(batch.indexes, "<i8").tolist()
        tags = batch.tags or [{} for _ in window]
        fields: list[list[str]] = [[] for _ in window]
        try:
            for rows, names, loaded in groups:
                for row, tag in zip(rows, loaded.batch.tags or [{} for _ in rows], strict=True):
                    tags[row], fields[row] = tag, names
                for positions, block in loaded.parts():
                    place = writer.add_block(len(found.parts), block.segments())
                    found.parts.append(_Part(place, [start + rows[position] for position in positions]))
        finally:
            for _, _, loaded in groups:
                loaded.release()
        found.indexes.extend(indexes)
        found.tags.extend(tags)
        found.fields.extend(fields)
    writer.add_file(ROWS, msgspec.msgpack.encode(found))
    writer.commit(storage_saved=True, user_metadata={}, rows=len(keys), partitions=1)
    return _counts(found)


async def _locate(client: Client, keys: list[str], partition: str) -> Batch:
    """The rows with all fields that any of them may have. Raises KeyNotFoundError."""
    engine = client.engine
    counts: Any = await engine.request(Snapshot(""), REQUEST_S)
    names = list(counts.value["partitions"].get(partition, {"fields": {}})["fields"])
    return await engine.lookup(Lookup(partition, keys=keys, fields=names), REQUEST_S)


def _fields_of_rows(batch: Batch) -> list[list[str]]:
    """The fields that each row of a located batch has."""
    found: list[list[str]] = [[] for _ in range(len(batch.indexes) // 8)]
    for family in batch.locations:
        for row in np.flatnonzero(np.frombuffer(family.block_of_row, "<i4") >= 0).tolist():
            found[row] += family.fields
    return found


async def _load(client: Client, keys: list[str], partition: str) -> tuple[Batch, list[_Group]]:
    """The located rows, and the data of those that have fields. Rows that others replace meanwhile are located again.

    Raises KeyNotFoundError, CheckpointError.
    """
    reason = ""
    for _ in range(_ATTEMPTS):
        batch = await _locate(client, keys, partition)
        fields = _fields_of_rows(batch)
        groups: list[_Group] = []
        try:
            for names in filter(None, dict.fromkeys(map(tuple, fields))):
                rows = [number for number, has in enumerate(fields) if tuple(has) == names]
                indexes = np.frombuffer(batch.indexes, "<i8")[rows].tobytes()
                lookup = Lookup(partition, indexes=indexes, fields=list(names), require_ready=True)
                located = await client.engine.lookup(lookup, REQUEST_S)
                loaded = await client.engine.load(located, lookup.fields or [], lookup, REQUEST_S)
                groups.append(_Group(rows, list(names), loaded))
        except (StorageKeyNotFoundError, NotReadyError) as error:  # a row was cleared meanwhile, and maybe put again
            reason = str(error)
            for group in groups:
                group.loaded.release()
        except BaseException:
            for group in groups:
                group.loaded.release()
            raise
        else:
            return batch, groups
    raise CheckpointError(
        f"rows of partition {partition!r} were replaced {_ATTEMPTS} times while they were read; pause their writers "
        f"({reason})"
    )


def _run(client: Client, work: Coroutine[Any, Any, T]) -> T:
    result: T = client.run(Operation, work, lambda found: found)
    return result


def _read_rows(directory: CheckpointDirectory, manifest: Manifest) -> _Rows:
    if ROWS not in manifest.files:
        raise CheckpointError(f"{directory} has a whole queue, not rows by key: load it with load_checkpoint")
    rows: _Rows = decoded(directory, manifest, ROWS, _Rows)
    check_places(directory, manifest, [part.place for part in rows.parts], ROWS)
    return rows


def _counts(rows: _Rows) -> dict[str, int]:
    places = [part.place for part in rows.parts]
    return {
        "keys": len(rows.keys),
        "rows_with_data": sum(map(bool, rows.fields)),
        "shards": len({place.file for place in places}),
        "bytes": sum(place.nbytes for place in places),
    }
