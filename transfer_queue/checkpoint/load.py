"""Loading a checkpoint into a queue of any number of storage units and any backend."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import numpy as np

from transfer_queue.checkpoint.directory import CheckpointDirectory, Range
from transfer_queue.checkpoint.files import (
    ROWS,
    BlockPlace,
    Manifest,
    Progress,
    check_places,
    read_file,
    read_manifest,
)
from transfer_queue.checkpoint.relocate import partitions_of_slots, relocate
from transfer_queue.checkpoint.save import REQUEST_S, WINDOW_BLOCKS, WINDOW_BYTES, client_of_this_process
from transfer_queue.checkpoint.series import newest
from transfer_queue.checkpoint.shards import partitions_of_shard
from transfer_queue.client.arguments import check_flag
from transfer_queue.client.client import Client
from transfer_queue.client.engine import Engine
from transfer_queue.client.operation import Operation
from transfer_queue.client.shards import engines_of
from transfer_queue.client.windows import windows as client_windows
from transfer_queue.columns.block import BlockView, EncodedBlock
from transfer_queue.control.checkpoint import counted
from transfer_queue.control.commands import BlockRef
from transfer_queue.control.directory import shard_of
from transfer_queue.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConnectionLostError,
    CorruptBlockError,
    CorruptCheckpointError,
    QueueNotEmptyError,
    TransferQueueError,
    WaitTimeoutError,
)
from transfer_queue.storage.base import UnitInfo
from transfer_queue.wire.messages import Adopt

__all__ = ["load_checkpoint", "load_queue", "was_interrupted"]

log = logging.getLogger(__name__)

WAIT_S = 10.0
"""Time to wait for space in storage."""
Stored = list[list[tuple[BlockRef, UnitInfo]]]


def load_checkpoint(checkpoint_dir: str | os.PathLike[str], *, replace: bool = True) -> None:
    """Bring back what ``save_checkpoint`` wrote, all or nothing.

    The number of storage units, their capacity and the backend may differ from the saved queue. Waiting fetches are
    served.

    Warning:
        Python objects in rows are pickled, and a reader of such a row runs what the pickle says. Load only files that
        you trust, or load them into a queue with ``security.allowPickle: false``.

    Args:
        checkpoint_dir: the directory or URL that was given to ``save_checkpoint``, or to
            ``tq checkpoint save --every``, of whose checkpoints the newest is loaded.
        replace: replace all rows of the queue by the checkpoint, atomically; the log names the partitions that had
            rows. Storage must hold both until then. If False, a queue that has rows is refused.

    Raises:
        NotInitializedError: the process is attached to no queue.
        CheckpointNotFoundError: there is no complete checkpoint.
        CorruptCheckpointError: a file is damaged; the message names it.
        QueueNotEmptyError: the queue has rows, and ``replace`` is False.
        CapacityError: the storage units have too little room.

    In each case the queue is unchanged, with one exception: if the load is killed, or one of several controllers
    fails, while they take over the checkpoint, the queue refuses requests for rows with a CheckpointError until a
    checkpoint is loaded again.
    """
    directory = newest(checkpoint_dir)
    check_flag("replace", replace)
    load_queue(client_of_this_process(), directory, replace=replace)


def load_queue(
    client: Client, directory: CheckpointDirectory, *, replace: bool = False, progress: Progress | None = None
) -> Manifest:
    """``load_checkpoint`` into the queue of ``client``; returns what was loaded."""
    with reading(directory) as manifest:
        _load(client, directory, manifest, replace, progress)
        return manifest


@contextmanager
def reading(directory: CheckpointDirectory) -> Iterator[Manifest]:
    """Nobody writes to the checkpoint meanwhile. Raises CheckpointNotFoundError, CheckpointError."""
    try:
        with directory.locked(shared=True):
            yield read_manifest(directory)
    except OSError as error:
        if isinstance(error, TransferQueueError):
            raise
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise CheckpointNotFoundError(f"checkpoint not found: there is no directory {directory}") from None
        raise CheckpointError(f"cannot load from {directory}: {error.strerror or error}") from error


def verify(directory: CheckpointDirectory, manifest: Manifest, *, progress: Progress | None = None) -> None:
    """Read every block. Raises CorruptCheckpointError naming the file that is damaged."""
    for _ in _blocks(directory, manifest, progress):
        pass


def captured_state(directory: CheckpointDirectory, manifest: Manifest) -> dict[str, Any]:
    """``state`` of the controller and, if it has one to keep, ``sampler``. Raises CorruptCheckpointError, and
    CheckpointError for the rows of a dump."""
    if ROWS in manifest.files:
        raise CheckpointError(f"{directory} has rows by key, not a whole queue: load it with load_data_by_key")
    captured: dict[str, Any] = decoded(directory, manifest, "controller.msgpack", dict)
    path = f"{directory}/{manifest.data}/controller.msgpack"
    if not isinstance(captured.get("state"), dict):
        raise CorruptCheckpointError(f"{path} is damaged: state is not a map")
    match captured.get("sampler", ["", {}]):
        case [str(), _]:
            return captured
    raise CorruptCheckpointError(f"{path} is damaged: sampler is not a name and a state")


def was_interrupted(client: Client) -> bool:
    """Whether some controllers of the queue may have a checkpoint that others lack, so that all refuse requests."""
    engines = engines_of(client.engine)
    return len(engines) > 1 and any(_step(client, engine, Adopt(step="ask")).value for engine in engines)


def _step(client: Client, engine: Engine, message: Adopt) -> Any:
    return client.run(Operation, engine.ask(message, REQUEST_S), lambda reply: reply)


def _load(
    client: Client,
    directory: CheckpointDirectory,
    manifest: Manifest,
    replace: bool,
    progress: Progress | None,
) -> None:
    engines = engines_of(client.engine)
    interrupted = was_interrupted(client)
    found = {} if interrupted else client.run(client.rows.row_counts)
    if found and not replace:
        raise QueueNotEmptyError(
            f"the queue is not empty, it has {counted(found)}; clear them first, load the checkpoint into a new queue, "
            "or replace the rows of the queue (replace=True, --replace of tq checkpoint load)"
        )
    captured = captured_state(directory, manifest)
    stored: list[Stored] = [[] for _ in engines]
    slots: list[list[int]] = [[] for _ in engines]
    adopted: list[Engine] = []
    try:
        with _sensible(directory):
            partitions = partitions_of_slots(captured["state"])
        for window, blocks in _blocks(directory, manifest, progress):
            scopes = [partitions.get(place.slot, "") for place in window]
            owners = [shard_of(name, len(engines)) for name in scopes]
            for shard in sorted(set(owners)):
                own = [number for number, owner in enumerate(owners) if owner == shard]
                store = engines[shard].store_blocks(
                    [blocks[number] for number in own], [scopes[number] for number in own], WAIT_S, REQUEST_S
                )
                stored[shard] += client.run(Operation, store, lambda refs: refs)
                slots[shard] += [window[number].slot for number in own]
        with _sensible(directory):
            parts = [_part(captured, shard, len(engines), slots[shard], stored[shard]) for shard in range(len(engines))]
        with _together(client, engines, adopted, directory, replace, interrupted):
            for engine, content, refs in zip(engines, parts, stored, strict=True):
                adopted.append(engine)  # perhaps: an interrupt or a lost connection hides the answer
                try:
                    message = Adopt(replace or interrupted)
                    client.run(Operation, engine.transfer(message, [content], REQUEST_S), lambda payload: None)
                except TransferQueueError as error:
                    if not isinstance(error, ConnectionLostError | WaitTimeoutError):
                        adopted.remove(engine)
                    raise
                engine.settle(refs)
        if found:
            log.warning("the checkpoint %s replaced the rows of the queue: %s", directory, counted(found))
    except BaseException:
        for engine, refs in zip(engines, stored, strict=True):
            if engine not in adopted:
                client.run(Operation, engine.discard_blocks(refs), lambda done: None)
        raise


def _part(captured: dict[str, Any], shard: int, shards: int, slots: list[int], stored: Stored) -> bytes:
    """The state that one controller takes over, encoded."""
    part = partitions_of_shard(captured, shard, shards)
    refs = {slot: [ref for ref, _ in parts] for slot, parts in zip(slots, stored, strict=True)}
    return msgspec.msgpack.encode({**part, "state": relocate(part["state"], refs)})


@contextmanager
def _together(
    client: Client,
    engines: Sequence[Engine],
    adopted: Sequence[Engine],
    directory: CheckpointDirectory,
    replace: bool,
    interrupted: bool,
) -> Iterator[None]:
    """Several controllers serve requests for rows again once all have adopted their parts, or if none has.

    ``adopted``: those that have, as far as this client can know. Raises CheckpointError if only some have.
    """
    if len(engines) == 1:
        yield
        return
    begun: list[Engine] = []
    try:
        for engine in engines:
            begun.append(engine)
            _step(client, engine, Adopt(replace or interrupted, "begin"))
        yield
        for engine in engines:
            _step(client, engine, Adopt(step="end"))
    except BaseException as error:
        for engine in begun:
            with suppress(TransferQueueError):  # it has not begun, or its controller is gone
                _step(client, engine, Adopt(step="leave" if adopted or interrupted else "end"))
        if adopted and isinstance(error, TransferQueueError):
            raise CheckpointError(
                f"{len(adopted)} of {len(engines)} controllers have taken over the checkpoint {directory}, or may "
                f"have, and then one failed: {error}; the queue refuses requests for rows until it is loaded again"
            ) from error
        raise


def _blocks(
    directory: CheckpointDirectory, manifest: Manifest, progress: Progress | None
) -> Iterator[tuple[list[BlockPlace], list[EncodedBlock]]]:
    """All blocks, some at a time. ``progress`` is told of those that the caller is done with."""
    places = decoded(directory, manifest, "blocks.msgpack", list[BlockPlace])
    check_places(directory, manifest, places, "blocks.msgpack")
    done, total = 0, sum(place.nbytes for place in places)
    for window in windows(places):
        yield window, read_blocks(directory, manifest, window)
        done += sum(place.nbytes for place in window)
        if progress is not None:
            progress(done, total)


@contextmanager
def _sensible(directory: CheckpointDirectory) -> Iterator[None]:
    """Raises CorruptCheckpointError for what a damaged state raises."""
    try:
        yield
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise CorruptCheckpointError(f"{directory}: controller.msgpack is damaged: {error!r}") from error


def decoded(directory: CheckpointDirectory, manifest: Manifest, name: str, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(read_file(directory, manifest, name), type=kind, strict=False)
    except msgspec.DecodeError as error:
        raise CorruptCheckpointError(f"{directory}/{manifest.data}/{name} is damaged: {error}") from None


def windows(places: list[BlockPlace]) -> Iterator[list[BlockPlace]]:
    return client_windows(places, lambda place: place.nbytes, WINDOW_BLOCKS, WINDOW_BYTES)


def read_blocks(directory: CheckpointDirectory, manifest: Manifest, places: list[BlockPlace]) -> list[EncodedBlock]:
    ranges = [Range(manifest.path_of(place.file), place.offset, place.nbytes) for place in places]
    blocks = []
    for place, part, content in zip(places, ranges, directory.read_ranges(ranges), strict=True):
        data = np.frombuffer(content, np.uint8)
        if data.nbytes != place.nbytes or zlib.crc32(data.data) != place.crc32:
            raise CorruptCheckpointError(
                f"{directory.locate(part.name)} is damaged: the block at {place.offset} has another checksum"
            )
        try:
            blocks.append(BlockView(data).select(None, None))
        except CorruptBlockError as error:
            raise CorruptCheckpointError(
                f"{directory.locate(part.name)} is damaged: the block at {place.offset}: {error}"
            ) from error
    return blocks
