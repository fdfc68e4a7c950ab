"""Writing a checkpoint while producers and consumers go on."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import msgspec
import numpy as np

from transfer_queue.checkpoint.directory import CheckpointDirectory, open_directory
from transfer_queue.checkpoint.files import (
    BlockPlace,
    Manifest,
    Progress,
    Writer,
    check_not_foreign,
)
from transfer_queue.client.arguments import check_flag
from transfer_queue.client.client import Client
from transfer_queue.client.engine import Engine
from transfer_queue.client.operation import Operation
from transfer_queue.control.directory import NO_CHECKPOINT
from transfer_queue.errors import (
    CheckpointError,
    ConnectionLostError,
    DataLostError,
    InvalidTypeError,
    NotInitializedError,
    TransferQueueError,
    UnsupportedRequestError,
)
from transfer_queue.lifecycle import current_client
from transfer_queue.storage.base import Fetched
from transfer_queue.wire.messages import Capture, EndCapture

__all__ = ["client_of_this_process", "engine_of", "save_checkpoint", "save_queue"]

REQUEST_S = 120.0
_RETRY_FOR_S = 20.0
WINDOW_BYTES = 64 << 20
"""Blocks that are moved at a time."""
WINDOW_BLOCKS = 256


def save_checkpoint(
    checkpoint_dir: str | os.PathLike[str], *, include_storage: bool = True, metadata: dict[str, Any] | None = None
) -> None:
    """Write the whole queue as it is at one moment: data, keys in their order, tags, consumption, the sampler's state.

    Others go on meanwhile; what they put, clear or overwrite after that moment is not in the checkpoint, and storage
    that they clear is freed when the save ends. An existing checkpoint is replaced atomically, and stays valid if the
    save fails or is killed.

    Args:
        checkpoint_dir: a directory, which is made if it does not exist, or a URL that fsspec knows, such as
            ``s3://bucket/run7/queue``. An object store has no locks: run one save at a time there.
        include_storage: if False, leave the data out, unless the backend is ``simple``. The rows are then loaded as
            lost.
        metadata: JSON of your own.

    Raises:
        NotInitializedError: the process is attached to no queue.
        InvalidTypeError: an argument has the wrong type.
        InvalidInputError: fsspec does not know the URL, or the library for it is not installed.
        CheckpointError: a file cannot be written, or the directory belongs to something else.
        DataLostError, ConnectionLostError: a storage unit goes away.
        UnsupportedRequestError: the queue has several controllers.

    Example:
        >>> tq.save_checkpoint("s3://bucket/run7/queue", metadata={"step": 1200})
    """
    directory = open_directory(checkpoint_dir)
    metadata = _check_metadata(metadata)
    check_flag("include_storage", include_storage)
    save_queue(client_of_this_process(), directory, include_storage=include_storage, metadata=metadata)


def save_queue(
    client: Client,
    directory: CheckpointDirectory,
    *,
    include_storage: bool = True,
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """``save_checkpoint`` of the queue of ``client``; returns what was written."""
    engine_of(client)
    try:
        directory.create()
        with directory.locked(shared=False):
            check_not_foreign(directory)
            writer = Writer(directory)
            try:
                return _save(client, writer, include_storage, metadata or {}, progress)
            except BaseException:
                writer.abandon()
                raise
    except OSError as error:
        if isinstance(error, TransferQueueError):
            raise
        raise CheckpointError(f"cannot save to {directory}: {error.strerror or error}") from error


def client_of_this_process() -> Client:
    try:
        return current_client()
    except NotInitializedError as error:
        raise NotInitializedError(f"TransferQueue is not initialized in this process: {error}") from None


def engine_of(client: Client) -> Engine:
    """Raises UnsupportedRequestError for a queue of several controllers."""
    if not isinstance(client.engine, Engine):
        raise UnsupportedRequestError(NO_CHECKPOINT)
    return client.engine


def _check_metadata(metadata: object) -> dict[str, Any]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise InvalidTypeError(f"metadata must be a dict, not {type(metadata).__name__}")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidTypeError(f"metadata must be plain JSON: {error}") from None
    return plain


def _save(
    client: Client,
    writer: Writer,
    include_storage: bool,
    metadata: dict[str, Any],
    progress: Progress | None,
) -> Manifest:
    engine = engine_of(client)
    content = client.run(Operation, engine.transfer(Capture(), (), REQUEST_S), lambda payload: payload)
    try:
        captured = msgspec.msgpack.decode(content)
        with_data = include_storage or engine.backend_kind == "simple"
        places = _copy_blocks(client, writer, captured["state"], progress) if with_data else []
    finally:
        _end_capture(client)
    writer.add_file("controller.msgpack", bytes(content))
    writer.add_file("blocks.msgpack", msgspec.msgpack.encode(places))
    partitions = captured["state"]["partitions"]
    return writer.commit(
        storage_saved=with_data,
        user_metadata=metadata,
        rows=sum(partition["rows"] for partition in partitions),
        partitions=len(partitions),
    )


def _end_capture(client: Client) -> None:
    try:
        client.run(Operation, engine_of(client).transfer(EndCapture(), (), REQUEST_S), lambda payload: None)
    except ConnectionLostError:
        return  # it ended with the connection


def _copy_blocks(client: Client, writer: Writer, state: dict[str, Any], progress: Progress | None) -> list[BlockPlace]:
    """All blocks whose storage unit is there, into files."""
    table = state["blocks"]
    unit, block, nbytes, cells = (
        np.frombuffer(table[name], dtype)
        for name, dtype in (("unit", np.int32), ("block", np.uint64), ("nbytes", np.int64), ("cells", np.uint32))
    )
    slots = np.flatnonzero((cells > 0) & ~np.isin(unit, state["lost_units"]))
    places: list[BlockPlace] = []
    done, total = 0, int(nbytes[slots].sum())
    first = 0
    while first < len(slots):
        stop = first + 1
        size = int(nbytes[slots[first]])
        while stop < len(slots) and stop - first < WINDOW_BLOCKS and size + int(nbytes[slots[stop]]) <= WINDOW_BYTES:
            size += int(nbytes[slots[stop]])
            stop += 1
        window = slots[first:stop]
        fetched = _read(client, [(int(unit[slot]), int(block[slot]), int(nbytes[slot])) for slot in window])
        try:
            for slot, found in zip(window.tolist(), fetched.blocks, strict=True):
                places.append(writer.add_block(slot, found.view.select(None, None).segments()))
        finally:
            fetched.release()
        first = stop
        done += size
        if progress is not None:
            progress(done, total)
    return places


def _read(client: Client, blocks: list[tuple[int, int, int]]) -> Fetched:
    """A storage unit whose connection broke may come back."""
    deadline = time.monotonic() + _RETRY_FOR_S
    while True:
        try:
            read = engine_of(client).read_blocks(blocks, REQUEST_S)
            found: Fetched = client.run(Operation, read, lambda fetched: fetched)
            return found
        except (ConnectionLostError, DataLostError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
