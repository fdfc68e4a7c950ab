"""Operations on rows by index: the low-level interface (`get_meta`, `put`, `get_data`, ...)."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from transfer_queue import sampler
from transfer_queue.client.arguments import (
    check_count,
    check_data,
    check_fields,
    check_flag,
    check_lease,
    check_mapping,
    check_metadata,
    check_name,
    check_params,
    check_partition,
    check_placement,
    check_seconds,
    check_tags,
    check_text,
)
from transfer_queue.client.fetches import Fetches
from transfer_queue.client.notices import Notices, value_of
from transfer_queue.client.operation import Operation, spanned
from transfer_queue.client.options import ClientOptions
from transfer_queue.client.parser import DataParser, parsed
from transfer_queue.client.read_options import DEFAULT_READ, ReadOptions
from transfer_queue.client.reading import LoadedBatch, LoadedBatches
from transfer_queue.client.shards import QueueEngine
from transfer_queue.columns.column import Bytes
from transfer_queue.columns.recycling import empty_bytes
from transfer_queue.control.commands import (
    Acknowledge,
    Batch,
    Clear,
    Commit,
    Committed,
    ConsumptionStatus,
    Done,
    Fetch,
    ListPartitions,
    Lookup,
    ProductionStatus,
    Reply,
    ResetConsumption,
    SetTags,
    Snapshot,
    StatusArrays,
)
from transfer_queue.control.puts import did_you_mean, name_some
from transfer_queue.errors import (
    InvalidInputError,
    InvalidTypeError,
    NotReadyError,
    RequestError,
)
from transfer_queue.metadata import BatchMeta, describe_fields

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from transfer_queue.columns.block import EncodedBlock

Status: TypeAlias = "tuple[torch.Tensor | None, torch.Tensor | None]"

__all__ = ["FetchOptions", "RowOperations", "pack_indexes", "request_in_parts", "unpack_indexes"]

log = logging.getLogger(__name__)

EMPTY = Batch(b"")
_BASES = ("BaseSampler", "PlannedSampler")
_READS: dict[str, tuple[str, ...]] = {
    name: getattr(sampler, name).config_keys
    for name in sampler.__all__
    if name.endswith("Sampler") and name not in _BASES
}
"""What each sampler of this package reads of ``sampling_config``."""
_CONFIG = tuple(dict.fromkeys(key for keys in _READS.values() for key in keys))
_OF_SAMPLERS = ("n_samples_per_prompt", "group_tag", "max_staleness")
"""What people write into ``sampling_config`` and is an argument of samplers."""
ROWS_AT_ONCE = 8192
"""Rows that one request clears, tags or acknowledges."""


def pack_indexes(indexes: Sequence[int]) -> bytes:
    """Global indexes -> i64 bytes. Raises InvalidInputError for one that is no int64."""
    try:
        return array("q", indexes).tobytes()
    except OverflowError:
        raise InvalidInputError("global_indexes holds a number that is not a 64-bit index") from None
    except TypeError as error:
        raise InvalidTypeError(f"global_indexes must hold ints: {error}") from None


def unpack_indexes(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype="<i8").tolist()  # type: ignore[no-any-return]


def batch_meta(batch: Batch, partition_id: str, extra_info: dict[str, Any] | None = None) -> BatchMeta:
    """Convert a batch to the metadata that users see."""
    count = len(batch.indexes) // 8
    return BatchMeta(
        unpack_indexes(batch.indexes),
        [partition_id] * count,
        describe_fields(batch.fields, count, batch.lengths),
        np.frombuffer(batch.status, dtype=np.int8) if batch.status else np.zeros(count, np.int8),
        extra_info,
        [dict(tag) for tag in batch.tags] if batch.tags else None,
    )


class FetchOptions(NamedTuple):
    """Arguments of a fetch; see ``AsyncClient.async_get_meta``. ``mode="insert"`` uses ``batch_size`` only."""

    batch_size: int | None
    task_name: str | None
    sampling_config: dict[str, Any] | None
    timeout: float | None
    lease: float | None
    token_budget: int | None


async def request_in_parts(engine: QueueEngine, command: Acknowledge | Clear | SetTags, timeout_s: float) -> Done:
    """Carry out a command about named rows, some thousand at a time: each request stops the controller's loop."""
    count = len(command.indexes or b"") // 8
    if isinstance(command, Clear) and command.keys is not None:
        count = len(command.keys)
    if count <= ROWS_AT_ONCE:
        return _done(await engine.request(command, timeout_s))
    absent, missing = False, 0
    for start in range(0, count, ROWS_AT_ONCE):
        stop = start + ROWS_AT_ONCE
        indexes = None if command.indexes is None else command.indexes[8 * start : 8 * stop]
        part: Acknowledge | Clear | SetTags = replace(command, indexes=indexes)
        if isinstance(command, Clear) and command.keys is not None:
            part = replace(command, keys=command.keys[start:stop])
        elif isinstance(command, SetTags):
            part = replace(command, indexes=indexes, tags=command.tags[start:stop])
        done = _done(await engine.request(part, timeout_s))
        absent, missing = absent or done.absent, missing + done.missing
    return Done(absent, missing)


def tell_of_rows(notices: Notices, done: Batch | Committed, partition: str) -> None:
    """Warn of a group of rows that came in several puts, and of rows behind the end of their partition."""
    if not isinstance(done, Committed):
        return
    if done.late:
        notices.warn(
            "put after the end",
            partition,
            f"partition {partition!r} got rows after a put with is_last=True; streams that have ended do not read them",
        )
    if done.split:
        notices.warn(
            "put",
            partition,
            f"rows of one group of partition {partition!r} came in several puts. The sampler takes consecutive rows as "
            "a group, even of different prompts: put the rows of a prompt in one call, or give them a common tag and "
            "pass its name to GRPOGroupNSampler(..., group_tag=...). Ignore this if one loop puts every row of a "
            "prompt before the first row of the next",
        )


class RowOperations:
    """Builds the operations of ``AsyncClient``."""

    def __init__(self, engine: QueueEngine, options: ClientOptions, notices: Notices) -> None:
        self._engine = engine
        self._options = options
        self._notices = notices
        self._fetches = Fetches(engine, options.request_s, notices)

    # ------------------------------------------------------------------------------------------------------------ get

    @spanned("fetch")
    def get_meta(
        self, partition_id: str, data_fields: Sequence[str], mode: str, options: FetchOptions, is_last: bool
    ) -> Operation[Batch | Committed, BatchMeta]:
        request_s = self._options.request_s
        check_partition(partition_id)
        fields = check_fields("data_fields", data_fields)
        mode = check_text("mode", mode)
        if check_flag("is_last", is_last) and mode != "insert":
            raise InvalidInputError("is_last goes with new rows only: with put, or mode insert")
        if mode == "force_fetch":
            return Operation(self._look_up(partition_id, fields), lambda batch: batch_meta(_batch(batch), partition_id))
        if mode == "insert":
            rows = check_count("batch_size", options.batch_size)
            commit = Commit(partition_id, append=rows, wait_s=self._options.put_wait_s, last=is_last)

            def inserted(done: Batch | Committed) -> BatchMeta:
                tell_of_rows(self._notices, done, partition_id)
                return batch_meta(Batch(done.indexes), partition_id)

            return Operation(self._engine.put(None, commit, timeout_s=request_s), inserted)
        if mode != "fetch":
            raise RequestError(f"mode {mode!r} is unknown; use fetch, force_fetch or insert")
        fetch = self._fetch_command(partition_id, fields, options)

        def finish(reply: Batch | Committed) -> BatchMeta:
            batch = _batch(reply)
            metadata = batch_meta(batch, partition_id)
            metadata._located = Batch(batch.indexes, locations=batch.locations)
            return metadata

        work = self._fetches.fetch(fetch, strict=bool(options.timeout))
        return Operation(work, finish, span=lambda: {"partition": partition_id, "task": fetch.task})

    async def _look_up(self, partition: str, fields: list[str]) -> Batch:
        """All rows of a partition; a field that none of them has is warned of."""
        batch = await self._engine.lookup(Lookup(partition, fields=fields, locate=False), self._options.request_s)
        found = {schema.name for schema in batch.fields}
        if (
            batch.indexes
            and not found.issuperset(fields)
            and (hindrance := await self._fetches.hindrance(partition, fields))
        ):
            log.warning("get_meta in mode force_fetch leaves fields out: %s", hindrance)
        return batch

    def _fetch_command(self, partition_id: str, fields: list[str], options: FetchOptions) -> Fetch:
        if options.task_name is None or not check_text("task_name", options.task_name):
            raise RequestError("get_meta in mode fetch needs task_name: consumption is counted per task")
        params = {} if options.sampling_config is None else check_params("sampling_config", options.sampling_config)
        if options.token_budget is not None:
            params = {**params, "token_budget": check_count("token_budget", options.token_budget)}
        if params:
            self._tell_unread(params, options.task_name)
        counted_in_tokens = options.batch_size is None and "token_budget" in params
        return Fetch(
            partition_id,
            fields,
            check_count("batch_size", 0 if counted_in_tokens else options.batch_size),
            options.task_name,
            self._options.fetch_s if options.timeout is None else check_seconds("timeout", options.timeout),
            params,
            lease_s=check_lease("lease", options.lease),
        )

    def _tell_unread(self, params: dict[str, Any], task: str) -> None:
        """Warn once of what the queue's sampler ignores, if it is one of this package."""
        name = str(self._engine.controller_attributes.get("sampler", ""))
        if name not in _READS or (unread := [key for key in params if key not in _READS[name]]) == []:
            return
        if hint := did_you_mean([key for key in unread if key not in _CONFIG], _CONFIG):
            self._notices.warn("sampling_config", task, f"no sampler reads all of {sorted(params)}{hint}")
        if params.get("dp_rank") == 0 and "task_name" in params:  # of a StreamingDataset, which may be the only rank
            return
        for key in unread:
            if key in _CONFIG:
                readers = ", ".join(reader for reader, keys in _READS.items() if key in keys)
                self._notices.warn("sampling_config", key, f"{name} of this queue does not read {key}; {readers} do")
            elif key in _OF_SAMPLERS:
                text = f"{name} of this queue does not read {key}: set it in controller.sampler.args of the queue"
                self._notices.warn("sampling_config", key, text)

    @spanned("get")
    def get_data(
        self, metadata: BatchMeta, options: ReadOptions = DEFAULT_READ
    ) -> Operation[LoadedBatches, TensorDict]:
        checked = options.checked(self._options)
        if len(check_metadata(metadata)) and not metadata.field_names and self._options.missing_fields == "error":
            raise NotReadyError(
                f"metadata names no field to read of its {len(metadata)} rows in {_partitions(metadata)!r}: "
                "select_fields and mode force_fetch leave out fields that the rows do not have"
            )
        return Operation(
            self._load(metadata),
            lambda loaded: loaded.decode(checked),
            drop=LoadedBatches.release,
            direct=True,
            span=lambda: {"partition": _partitions(metadata)},
        )

    async def _load(self, metadata: BatchMeta) -> LoadedBatches:
        parts: list[tuple[NDArray[np.int64], LoadedBatch]] = []
        loaded = LoadedBatches(parts)
        try:
            for partition, positions in _by_partition(metadata) if metadata.field_names else ():
                parts.append((positions, await self._load_rows(metadata, partition, positions)))
        except BaseException:
            loaded.release()
            raise
        return loaded

    async def _load_rows(self, metadata: BatchMeta, partition: str, positions: NDArray[np.int64]) -> LoadedBatch:
        fields, located = metadata.field_names, metadata._located
        indexes = _indexes_at(metadata, positions)
        lookup = Lookup(partition, indexes=indexes, fields=fields, require_ready=True)
        # Rows and fields may have been changed since: only the very rows that were located, with all the fields.
        fits = located is not None and located.indexes == indexes
        fits = fits and located is not None and {*fields} <= {n for at in located.locations for n in at.fields}
        return await self._engine.find(lookup, fields, located if fits else None, self._options.request_s)

    # ------------------------------------------------------------------------------------------------------------ put

    @spanned("put")
    def put(
        self,
        data: TensorDict | dict[str, Any],
        metadata: BatchMeta | None,
        partition_id: str | None,
        data_parser: DataParser | None,
        custom_meta: list[dict[str, Any]] | None,
        is_last: bool,
        placement: str | None = None,
    ) -> Operation[Any, BatchMeta]:
        check_data("data", data)
        device = check_placement(placement)
        if check_flag("is_last", is_last) and metadata is not None:
            raise InvalidInputError("is_last goes with new rows only: give partition_id and no metadata")
        if metadata is not None:
            if not len(check_metadata(metadata)):
                raise InvalidInputError("metadata is empty: it names no rows to write")
            if partition_id is not None and (others := sorted({*metadata.partition_ids} - {partition_id})):
                raise InvalidInputError(
                    f"partition_id {partition_id!r} is not where the rows of metadata are ({name_some(others)}); leave "
                    "it out to write to those rows, or leave metadata out for new ones"
                )
            block = self._encode(data, data_parser, custom_meta, len(metadata))
            return self._put_to(metadata, block, custom_meta, device)
        if partition_id is None:
            raise InvalidInputError("partition_id must be provided when there is no metadata")
        partition = check_partition(partition_id)
        block = self._encode(data, data_parser, custom_meta, None)
        commit = Commit(partition, append=block.rows, tags=custom_meta, wait_s=self._options.put_wait_s, last=is_last)

        def finish(done: Committed) -> BatchMeta:
            tell_of_rows(self._notices, done, partition)
            status = b"\1" * block.rows
            batch = Batch(done.indexes, block.fields, status, custom_meta or [], lengths=block.lengths)
            return batch_meta(batch, partition)

        store = self._engine.put(block, commit, timeout_s=self._options.request_s, device=device)
        return Operation(store, finish, block.nbytes, direct=True, span=lambda: {"partition": partition})

    def _encode(
        self,
        data: TensorDict | dict[str, Any],
        data_parser: DataParser | None,
        custom_meta: list[dict[str, Any]] | None,
        rows: int | None,
    ) -> EncodedBlock:
        """Encode the data of a put to ``rows`` rows; None: as many new rows as there are."""
        from transfer_queue.columns.encoding import encode, numbers_as_tensors

        block = encode(parsed(numbers_as_tensors(data), data_parser), allow_pickle=self._options.allow_pickle)
        if block.rows == 0:
            raise InvalidInputError("data is empty: it has no rows")
        if rows not in (None, block.rows):
            raise RequestError(f"length mismatch: data has {block.rows} rows, metadata {rows}")
        if custom_meta is not None:
            check_tags("custom_meta", custom_meta, block.rows, "rows")
        return block

    def _put_to(
        self,
        metadata: BatchMeta,
        block: EncodedBlock,
        custom_meta: list[dict[str, Any]] | None,
        device: torch.device | None,
    ) -> Operation[None, BatchMeta]:
        row_tags = _tags_of(metadata, custom_meta)

        async def work() -> None:
            for partition, positions in _by_partition(metadata):
                indexes = _indexes_at(metadata, positions)
                part = block if len(positions) == block.rows else block.select(None, positions)
                tags = None if row_tags is None else [row_tags[at] for at in positions.tolist()]
                commit = Commit(partition, indexes=indexes, tags=tags, wait_s=self._options.put_wait_s)
                await self._engine.put(part, commit, timeout_s=self._options.request_s, device=device)

        def finish(done: None) -> BatchMeta:
            metadata.field_schema.update(describe_fields(block.fields, block.rows, block.lengths))
            metadata.production_status = np.ones(block.rows, np.int8)
            metadata.update_custom_meta(custom_meta)
            return metadata

        return Operation(work(), finish, block.nbytes, direct=True, span=lambda: {"partition": _partitions(metadata)})

    def set_custom_meta(self, metadata: BatchMeta) -> Operation[None, None]:
        for tag in check_metadata(metadata).custom_meta:
            check_mapping("custom_meta", tag)

        async def work() -> None:
            for partition, positions in _by_partition(metadata):
                indexes = _indexes_at(metadata, positions)
                tags = [metadata.custom_meta[position] for position in positions]
                await request_in_parts(self._engine, SetTags(partition, indexes, tags), self._options.request_s)

        return Operation(work(), _nothing)

    def acknowledge(self, metadata: BatchMeta, task_name: str, strict: bool = True) -> Operation[None, None]:
        """``strict``: a task that the partition does not know is an error, and nothing is acknowledged."""
        check_metadata(metadata)
        task = check_name("task_name", task_name)

        async def work() -> None:
            for partition, positions in _by_partition(metadata):
                command = Acknowledge(partition, task, _indexes_at(metadata, positions), strict)
                if (await request_in_parts(self._engine, command, self._options.request_s)).absent:
                    tasks = (await self._fetches.counts(partition)).get("tasks", ())
                    raise RequestError(
                        f"task {task!r} has taken no rows of partition {partition!r}, so it has none to acknowledge"
                        f"{did_you_mean([task], tasks)}"
                    )

        return Operation(work(), _nothing)

    # ---------------------------------------------------------------------------------------------------------- clear

    def clear_samples(self, metadata: BatchMeta) -> Operation[None, None]:
        check_metadata(metadata)

        async def work() -> None:
            for partition, positions in _by_partition(metadata):
                indexes = _indexes_at(metadata, positions)
                await request_in_parts(self._engine, Clear(partition, indexes=indexes), self._options.request_s)

        return Operation(work(), _nothing)

    def clear_partition(self, partition_id: str) -> Operation[None, None]:
        command = Clear(check_partition(partition_id))

        async def work() -> None:
            if (await request_in_parts(self._engine, command, self._options.request_s)).absent:
                await self._notices.absent("clear_partition", command.partition)

        return Operation(work(), _nothing)

    # --------------------------------------------------------------------------------------------------------- status

    def production_status(self, data_fields: Sequence[str], partition_id: str) -> Operation[StatusArrays, Status]:
        command = ProductionStatus(check_partition(partition_id), check_fields("data_fields", data_fields))

        async def work() -> StatusArrays:
            reply = _arrays(await self._engine.request(command, self._options.request_s))
            if not command.fields:
                self._notices.warn("production status", command.partition, "data_fields names no field")
            elif reply.indexes is None:
                await self._notices.absent("production status", command.partition, fields=command.fields)
            return reply

        return Operation(work(), lambda reply: _status(reply, True))

    def consumption_status(self, task_name: str, partition_id: str) -> Operation[StatusArrays, Status]:
        command = ConsumptionStatus(check_partition(partition_id), check_name("task_name", task_name))

        async def work() -> StatusArrays:
            reply = _arrays(await self._engine.request(command, self._options.request_s))
            if reply.indexes is None or 1 not in reply.status:
                await self._notices.absent("consumption status", command.partition, task=command.task)
            return reply

        return Operation(work(), lambda reply: _status(reply, False))

    def production_completed(self, partition_id: str) -> Operation[dict[str, Any], bool]:
        work = self._counts_or_notice("check_production_completed", check_partition(partition_id), None)
        return Operation(work, _is_complete)

    def partition_counts(self, partition_id: str) -> Operation[dict[str, Any], dict[str, Any]]:
        """See ``control.queries.count_rows``; empty for an unknown partition."""
        return Operation(self._fetches.counts(check_partition(partition_id)), dict)

    def stream_drained(self, task_name: str, partition_id: str) -> Operation[dict[str, Any], bool]:
        task = check_name("task_name", task_name)

        def finish(counts: dict[str, Any]) -> bool:
            consumed = counts.get("tasks", {}).get(task, {}).get("consumed", 0)
            return _is_complete(counts) and bool(consumed == counts["rows"])

        work = self._counts_or_notice("check_stream_drained", check_partition(partition_id), task)
        return Operation(work, finish)

    async def _counts_or_notice(self, call: str, partition: str, task: str | None) -> dict[str, Any]:
        counts = await self._fetches.counts(partition)
        if not counts or (task is not None and task not in counts["tasks"]):
            await self._notices.absent(call, partition, task=task)
        return counts

    def reset_consumption(self, partition_id: str, task_name: str | None, idle: float) -> Operation[bool, bool]:
        task = None if task_name is None else check_name("task_name", task_name)
        command = ResetConsumption(check_partition(partition_id), task, check_seconds("idle", idle))

        async def work() -> bool:
            absent = _done(await self._engine.request(command, self._options.request_s)).absent
            if absent:
                await self._notices.absent("reset_consumption", command.partition, task=task)
            return not absent

        return Operation(work(), bool)

    def row_counts(self) -> Operation[Reply, dict[str, int]]:
        """Number of rows of each partition that has rows."""

        def finish(reply: Reply) -> dict[str, int]:
            counts = value_of(reply)["partitions"]
            return {name: found["rows"] for name, found in counts.items() if found["rows"]}

        return Operation(self._engine.request(Snapshot(""), self._options.request_s), finish)

    def partition_list(self) -> Operation[Reply, list[str]]:
        return Operation(self._engine.request(ListPartitions(""), self._options.request_s), value_of)


def _tags_of(metadata: BatchMeta, custom_meta: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tags that a put to the rows of ``metadata`` merges into theirs; None if there are none."""
    own = metadata.custom_meta
    if not any(own):
        return custom_meta
    for tag in own:
        check_mapping("custom_meta", tag)
    return own if custom_meta is None else [{**tag, **new} for tag, new in zip(own, custom_meta, strict=True)]


def _partitions(metadata: BatchMeta) -> str:
    return ", ".join(dict.fromkeys(metadata.partition_ids))


def _by_partition(metadata: BatchMeta) -> list[tuple[str, NDArray[np.int64]]]:
    """(partition, positions in the batch) in first-seen order."""
    names = metadata.partition_ids
    if names and names.count(names[0]) == len(names):
        return [(check_text("partition_ids of metadata", names[0]), np.arange(len(names)))]
    groups: dict[str, list[int]] = {}
    for position, partition in enumerate(names):
        groups.setdefault(check_text("partition_ids of metadata", partition), []).append(position)
    return [(partition, np.asarray(positions, np.int64)) for partition, positions in groups.items()]


def _indexes_at(metadata: BatchMeta, positions: NDArray[np.int64]) -> bytes:
    indexes = metadata.global_indexes
    return pack_indexes(indexes if len(positions) == len(indexes) else [indexes[at] for at in positions.tolist()])


def _is_complete(counts: dict[str, Any]) -> bool:
    return bool(counts) and bool(counts["ended"]) and counts["written"] == counts["rows"]


def _status(reply: StatusArrays, by_field: bool) -> Status:
    import torch

    if reply.indexes is None:
        return None, None
    indexes = torch.from_numpy(_own(reply.indexes).view("<i8"))
    status = torch.from_numpy(_own(reply.status).view(np.int8))
    return indexes, status.reshape(len(indexes), len(reply.columns)) if by_field else status


def _own(raw: bytes) -> Bytes:
    """A copy that may be written to, in memory that is used again when the copy is gone."""
    copy = empty_bytes(len(raw))
    copy[:] = np.frombuffer(raw, np.uint8)
    return copy


def _batch(reply: Batch | Committed) -> Batch:
    assert isinstance(reply, Batch)
    return reply


def _arrays(reply: Reply) -> StatusArrays:
    assert isinstance(reply, StatusArrays)
    return reply


def _done(reply: Reply) -> Done:
    assert isinstance(reply, Done)
    return reply


def _nothing(reply: object) -> None:
    return None
