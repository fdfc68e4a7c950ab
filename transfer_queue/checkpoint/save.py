"""Writing a checkpoint while producers and consumers go on."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np

from transfer_queue.checkpoint.borrow import identity_of, lent
from transfer_queue.checkpoint.directory import CheckpointDirectory, open_directory
from transfer_queue.checkpoint.files import (
    BlockPlace,
    Manifest,
    Progress,
    Writer,
    check_not_foreign,
)
from transfer_queue.checkpoint.shards import merge, slot_offsets
from transfer_queue.client.arguments import check_flag
from transfer_queue.client.client import Client
from transfer_queue.client.engine import Engine
from transfer_queue.client.moving import settle_moves
from transfer_queue.client.operation import Operation
from transfer_queue.client.shards import engines_of
from transfer_queue.control.blocks import COLUMNS
from transfer_queue.errors import (
    CheckpointError,
    ConnectionLostError,
    DataLostError,
    InvalidTypeError,
    NotInitializedError,
    TransferQueueError,
    WaitTimeoutError,
)
from transfer_queue.lifecycle import current_client
from transfer_queue.storage.base import Fetched
from transfer_queue.wire.messages import Capture, EndCapture, Resume

__all__ = ["client_of_this_process", "save_checkpoint", "save_queue", "writing"]

log = logging.getLogger(__name__)

REQUEST_S = 120.0
_END_S = 5.0
"""Of an EndCapture. A capture also ends with its connection, so a controller that is gone is not waited for."""
_RETRY_FOR_S = 20.0
_PAUSE_S = 0.2
WINDOW_BYTES = 64 << 20
"""Blocks that are moved at a time."""
WINDOW_BLOCKS = 256


def save_checkpoint(
    checkpoint_dir: str | os.PathLike[str], *, include_storage: bool = True, metadata: dict[str, Any] | None = None
) -> None:
    """Write the whole queue as it is at one moment: data, keys in their order, tags, consumption, the sampler's state.

    Others go on meanwhile; what they put, clear or overwrite after that moment is not in the checkpoint, and storage
    that they clear is freed when the save ends. An existing checkpoint is replaced atomically, and stays valid if the
    save fails or is killed. Data that it has already is not written again.

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
    former: CheckpointDirectory | None = None,
) -> Manifest:
    """``save_checkpoint`` of the queue of ``client``; returns what was written.

    ``former``: an earlier checkpoint of the same series. Blocks that it has are not written again; without one, this
    goes for those of the checkpoint that is replaced.
    """
    with writing(directory) as writer:
        return _save(client, writer, former, include_storage, metadata or {}, progress)


@contextmanager
def writing(directory: CheckpointDirectory, *, rows: bool = False) -> Iterator[Writer]:
    """Make the directory if need be; nobody else uses it meanwhile. Unless committed, what was there before stays.

    ``rows``: it is for a dump of rows by key. Raises CheckpointError.
    """
    try:
        directory.create()
        with directory.locked(shared=False):
            check_not_foreign(directory, rows=rows)
            writer = Writer(directory)
            try:
                yield writer
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
    former: CheckpointDirectory | None,
    include_storage: bool,
    metadata: dict[str, Any],
    progress: Progress | None,
) -> Manifest:
    engines, token = engines_of(client.engine), secrets.randbits(32)
    with ExitStack() as held:
        try:
            contents = client.run(Operation, _capture(engines, token), lambda payloads: payloads)
            captured = [msgspec.msgpack.decode(content) for content in contents]
            with_data = include_storage or client.engine.backend_kind == "simple"
            blocks = _blocks(engines, captured) if with_data else []
            loan = held.enter_context(lent(writer.directory, former, {block.identity for block in blocks}))
            writer.borrow(loan.files)
            places = _copy_blocks(client, writer, blocks, loan.places, progress)
        finally:
            _end_captures(client, token)
        state = merge(captured)
        content = bytes(contents[0]) if len(contents) == 1 else msgspec.msgpack.encode(state)
        writer.add_file("controller.msgpack", content)
        writer.add_file("blocks.msgpack", msgspec.msgpack.encode(places))
        partitions = state["state"]["partitions"]
        return writer.commit(
            storage_saved=with_data,
            user_metadata=metadata,
            rows=sum(partition["rows"] for partition in partitions),
            partitions=len(partitions),
        )


async def _capture(engines: Sequence[Engine], token: int) -> list[bytes]:
    """The state of each controller, all at one moment: none changes rows before all have handed out their state."""
    hold = len(engines) > 1
    deadline = time.monotonic() + _RETRY_FOR_S
    while hold:
        await settle_moves(engines)
        try:
            return await _capture_once(engines, token, hold)
        except WaitTimeoutError:  # a partition moves
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_PAUSE_S)
    return await _capture_once(engines, token, hold)


async def _capture_once(engines: Sequence[Engine], token: int, hold: bool) -> list[bytes]:
    asked = [asyncio.create_task(engine.transfer(Capture(hold, token), (), REQUEST_S)) for engine in engines]
    try:
        contents = await asyncio.gather(*asked)
    except BaseException:
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)  # none may begin after the captures have been ended
        raise
    if hold:
        await asyncio.gather(*(engine.transfer(Resume(token), (), REQUEST_S) for engine in engines))
    return contents


def _end_captures(client: Client, token: int) -> None:
    for engine in engines_of(client.engine):
        try:
            client.run(Operation, engine.transfer(EndCapture(token), (), _END_S), lambda payload: None)
        except TransferQueueError as error:  # it ends with the connection
            log.info("a capture was not ended in order: %s", error)


class _Block(NamedTuple):
    engine: Engine
    unit: int
    block: int
    nbytes: int
    slot: int
    """In the table of the merged state."""
    identity: bytes


def _blocks(engines: Sequence[Engine], captured: Sequence[dict[str, Any]]) -> list[_Block]:
    """All blocks whose storage unit is there."""
    return [
        block
        for engine, content, offset in zip(engines, captured, slot_offsets(captured), strict=True)
        for block in _present(engine, content["state"], offset)
    ]


def _copy_blocks(
    client: Client,
    writer: Writer,
    blocks: Sequence[_Block],
    lent: Mapping[bytes, BlockPlace],
    progress: Progress | None,
) -> list[BlockPlace]:
    """The places of all blocks, once those that are not lent are in files."""
    found = [
        msgspec.structs.replace(lent[block.identity], slot=block.slot) for block in blocks if block.identity in lent
    ]
    blocks = [block for block in blocks if block.identity not in lent]
    places: list[BlockPlace] = []
    done, total = 0, sum(block.nbytes for block in blocks)
    while len(places) < len(blocks):
        window = [blocks[len(places)]]
        size = window[0].nbytes
        for block in blocks[len(places) + 1 : len(places) + WINDOW_BLOCKS]:
            if block.engine is not window[0].engine or size + block.nbytes > WINDOW_BYTES:
                break
            window.append(block)
            size += block.nbytes
        fetched = _read(client, window)
        try:
            for block, read in zip(window, fetched.blocks, strict=True):
                places.append(writer.add_block(block.slot, read.view.select(None, None).segments(), block.identity))
        finally:
            fetched.release()
        done += size
        if progress is not None:
            progress(done, total)
    return found + places


def _present(engine: Engine, state: dict[str, Any], offset: int) -> list[_Block]:
    """The blocks of a controller that are not lost."""
    table = state["blocks"]
    unit, block, nbytes, cells = (
        np.frombuffer(table[name], COLUMNS[name]) for name in ("unit", "block", "nbytes", "cells")
    )
    slots = np.flatnonzero((cells > 0) & ~np.isin(unit, state["lost_units"]))
    return [
        _Block(
            engine,
            int(unit[slot]),
            int(block[slot]),
            int(nbytes[slot]),
            slot + offset,
            identity_of(engine.run, int(block[slot]), int(nbytes[slot])),
        )
        for slot in slots.tolist()
    ]


def _read(client: Client, blocks: Sequence[_Block]) -> Fetched:
    """A storage unit whose connection broke may come back."""
    wanted = [(block.unit, block.block, block.nbytes) for block in blocks]
    deadline = time.monotonic() + _RETRY_FOR_S
    while True:
        try:
            read = blocks[0].engine.read_blocks(wanted, REQUEST_S)
            found: Fetched = client.run(Operation, read, lambda fetched: fetched)
            return found
        except (ConnectionLostError, DataLostError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
