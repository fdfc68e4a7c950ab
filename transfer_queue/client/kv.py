"""Operations of the key-value interface, with the checks of their arguments."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeAlias

from transfer_queue._kv_meta import KVBatchMeta, repeated
from transfer_queue.client.arguments import (
    check_fields,
    check_flag,
    check_keys,
    check_partition,
    check_placement,
    check_tags,
)
from transfer_queue.client.notices import Notices, value_of
from transfer_queue.client.operation import Operation, spanned
from transfer_queue.client.options import ClientOptions
from transfer_queue.client.parser import DataParser, parsed
from transfer_queue.client.read_options import DEFAULT_READ, ReadOptions
from transfer_queue.client.reading import LoadedBatch, ReadPlan
from transfer_queue.client.rows import EMPTY, batch_meta, pack_indexes, request_in_parts, tell_of_rows
from transfer_queue.client.shards import QueueEngine
from transfer_queue.columns.kinds import is_kind
from transfer_queue.control.commands import Batch, Clear, Commit, Committed, KeysOf, ListKeys, Lookup, Reply
from transfer_queue.control.puts import name_some
from transfer_queue.errors import InvalidInputError, InvalidTypeError, KeyNotFoundError
from transfer_queue.metadata import BatchMeta

if TYPE_CHECKING:
    from tensordict import TensorDict

    from transfer_queue.client.locks import GlobalLock
    from transfer_queue.columns.block import EncodedBlock

__all__ = ["KvOperations", "single_row"]

log = logging.getLogger(__name__)

Tag = dict[str, Any]
Keys = dict[str, dict[str, Tag]]
Fields: TypeAlias = "list[str] | str | None"


class KvOperations:
    """Builds operations; see ``transfer_queue.interface`` for what each does."""

    def __init__(self, engine: QueueEngine, options: ClientOptions, notices: Notices) -> None:
        self._engine = engine
        self._options = options
        self._notices = notices
        self._dropped: set[str] = set()
        """Names of fields that were left out of an answer; each is logged once."""

    # ------------------------------------------------------------------------------------------------------------ put

    @spanned("put")
    def put_one(
        self,
        key: str,
        partition_id: str,
        fields: TensorDict | dict[str, Any] | None,
        tag: Tag | None,
        data_parser: DataParser | None,
        lock: GlobalLock | None = None,
        placement: str | None = None,
    ) -> Operation[Committed, KVBatchMeta]:
        if fields is None and tag is None:
            raise InvalidInputError("kv_put needs at least one parameter of fields and tag")
        if isinstance(fields, dict):
            fields = single_row(fields)
        elif fields is not None and not is_kind(fields, "TensorDictBase"):
            raise InvalidInputError(f"fields must be a dict or TensorDict, not {type(fields).__name__}")
        tags = None if tag is None else [tag]
        return self._put(check_keys([key]), partition_id, fields, tags, data_parser, lock, placement=placement)

    @spanned("put")
    def put(
        self,
        keys: list[str],
        partition_id: str,
        fields: TensorDict | dict[str, Any] | None,
        tags: list[Tag] | None,
        data_parser: DataParser | None,
        lock: GlobalLock | None = None,
        placement: str | None = None,
    ) -> Operation[Committed, KVBatchMeta]:
        if fields is None and tags is None:
            raise InvalidInputError("kv_batch_put needs at least one parameter of fields and tags")
        keys = check_keys(keys)
        if fields is not None and not isinstance(fields, dict) and not is_kind(fields, "TensorDictBase"):
            raise InvalidTypeError(
                f"fields must be a TensorDict or a dict of columns, not {type(fields).__name__}; "
                f"write TensorDict(columns, [{len(keys)}])"
            )
        if isinstance(fields, dict):
            from transfer_queue.columns.encoding import numbers_as_tensors

            fields = numbers_as_tensors(fields)
        return self._put(keys, partition_id, fields, tags, data_parser, lock, placement=placement)

    def _put(
        self,
        keys: list[str],
        partition_id: str,
        fields: Any,
        tags: list[Tag] | None,
        data_parser: DataParser | None,
        lock: GlobalLock | None = None,
        expects: dict[str, int] | None = None,
        placement: str | None = None,
    ) -> Operation[Committed, KVBatchMeta]:
        check_partition(partition_id)
        device = check_placement(placement)
        if len(set(keys)) != len(keys):
            raise InvalidInputError(f"Got duplicated keys: {sorted(repeated(keys))[:5]}")
        if tags is not None:
            check_tags("tags", tags, len(keys), "keys")
        block = self._encode(keys, fields, data_parser)
        if block is None and tags is None:
            raise InvalidInputError("fields is empty, which would make rows without data; give fields, or tags alone")
        number = 0 if lock is None else _lock_number(lock, partition_id, keys)
        wait_s = self._options.put_wait_s
        commit = Commit(partition_id, keys=keys, tags=tags, wait_s=wait_s, lock=number, expects=expects)

        def finish(done: Committed) -> KVBatchMeta:
            tell_of_rows(self._notices, done, partition_id)
            return KVBatchMeta(
                keys=list(keys),
                tags=done.tags or [{} for _ in keys],
                partition_id=partition_id,
                fields=list(done.ready),
                extra_info={},
            )

        store = self._engine.put(block, commit, timeout_s=self._options.request_s, device=device)
        nbytes = 0 if block is None else block.nbytes
        return Operation(store, finish, nbytes, direct=True, span=lambda: {"partition": partition_id})

    def _encode(self, keys: list[str], fields: Any, data_parser: DataParser | None) -> EncodedBlock | None:
        if fields is None or not len(list(fields.keys())):
            return None
        from transfer_queue.columns.encoding import encode

        if is_kind(fields, "TensorDictBase") and list(fields.batch_size[:1]) != [len(keys)]:
            raise InvalidInputError(
                f"{len(keys)} keys given, which does not match the batch size {list(fields.batch_size)} of fields"
            )
        return encode(parsed(fields, data_parser), rows=len(keys), allow_pickle=self._options.allow_pickle)

    # ------------------------------------------------------------------------------------------------------------ get

    @spanned("get")
    def get(
        self,
        keys: list[str] | str,
        partition_id: str,
        select_fields: Fields,
        options: ReadOptions = DEFAULT_READ,
    ) -> Operation[LoadedBatch, TensorDict]:
        return self._get(keys, partition_id, self._field_names(select_fields), options)

    def _get(
        self, keys: list[str] | str, partition_id: str, wanted: list[str] | None, options: ReadOptions
    ) -> Operation[LoadedBatch, TensorDict]:
        keys = check_keys([keys] if isinstance(keys, str) else keys)
        check_partition(partition_id)
        checked = options.checked(self._options)
        return Operation(
            self._load(keys, partition_id, wanted),
            lambda loaded: loaded.decode(checked),
            drop=LoadedBatch.release,
            direct=True,
            span=lambda: {"partition": partition_id},
        )

    @spanned("get")
    def get_by_meta(
        self, meta: KVBatchMeta, select_fields: Fields, options: ReadOptions = DEFAULT_READ
    ) -> Operation[LoadedBatch, TensorDict]:
        if not isinstance(meta, KVBatchMeta):
            advice = "; read a BatchMeta with get_data of the client" if isinstance(meta, BatchMeta) else ""
            raise InvalidTypeError(f"meta must be a KVBatchMeta, not {type(meta).__name__}{advice}")
        if not meta.partition_id:
            raise InvalidInputError("meta has no partition_id")
        wanted = self._field_names(select_fields)
        if wanted is not None:
            absent = sorted(set(wanted) - set(meta.fields or ()))
            if absent or meta.fields is None:
                raise InvalidInputError(f"select_fields {absent} not found in meta.fields {meta.fields}")
        wanted = meta.fields if wanted is None else wanted
        return self._get(list(meta.keys), meta.partition_id, wanted, options)

    async def _load(self, keys: list[str], partition_id: str, wanted: list[str] | None) -> LoadedBatch:
        timeout_s = self._options.request_s
        drops = self._options.missing_fields == "drop"
        asked = None if drops else wanted
        lookup = Lookup(partition_id, keys=keys, fields=asked, require_ready=True, alike=not drops)
        try:
            batch = await self._engine.lookup(lookup, timeout_s)
        except KeyNotFoundError as error:
            raise KeyNotFoundError(f"{error}{await self._notices.hint(partition_id)}") from None
        fields = [schema.name for schema in batch.fields]
        if wanted is not None and drops:
            self._tell_dropped([name for name in wanted if name not in set(fields)], partition_id)
            fields = [name for name in fields if name in set(wanted)]
        if not fields:
            return LoadedBatch(EMPTY, [], ReadPlan([], [], []), None)
        return await self._engine.load(batch, fields, lookup, timeout_s)

    def _field_names(self, select_fields: Fields) -> list[str] | None:
        if select_fields is None:
            return None
        names = check_fields("select_fields", [select_fields] if isinstance(select_fields, str) else select_fields)
        if not names and self._options.missing_fields == "error":
            raise InvalidInputError("select_fields is an empty list; leave it out to get all fields")
        return names

    def _tell_dropped(self, names: list[str], partition: str) -> None:
        if fresh := [name for name in names if name not in self._dropped]:
            self._dropped.update(fresh)
            log.warning(
                "fields %s are left out of a get from partition %r: not all of its rows have them. "
                "TQ_MISSING_FIELDS=error makes that an error",
                fresh,
                partition,
            )

    # --------------------------------------------------------------------------------------------------------- update

    def read_cells(self, key: str, partition_id: str, names: list[str]) -> Operation[Cells, Cells]:
        """What the row has of these fields now, and in which blocks; see ``transfer_queue.client.updates``."""
        timeout_s = self._options.request_s
        options = ReadOptions(layout="jagged").checked(self._options)

        async def work() -> Cells:
            lookup = Lookup(partition_id, keys=[key], fields=names)
            batch = await self._engine.lookup(lookup, timeout_s)
            present = [schema.name for schema in batch.fields]
            if not present:
                return Cells(dict.fromkeys(names, 0), None)
            loaded = await self._engine.load(batch, present, lookup, timeout_s)
            return Cells(cell_blocks(loaded.batch, names), loaded)  # of the batch that was read in the end

        def finish(cells: Cells) -> Cells:
            if cells.loaded is not None:
                rows = cells.loaded.decode(options)
                cells.values = {name: rows[name][0] for name in cells.blocks if name in rows}
            return cells

        return Operation(work(), finish, drop=Cells.release)

    def write_cells(
        self, key: str, partition_id: str, values: dict[str, Any], expects: dict[str, int]
    ) -> Operation[Committed, KVBatchMeta]:
        """Write fields of a row that exists, if its cells still lie in the blocks ``expects``."""
        return self._put([key], partition_id, single_row(values), None, None, expects=expects)

    # ------------------------------------------------------------------------------------------------- list and clear

    def list_keys(self, partition_id: str | None) -> Operation[Keys, Keys]:
        partition = "" if partition_id is None else check_partition(partition_id)

        async def work() -> Keys:
            found: Keys = value_of(await self._engine.request(ListKeys(partition), self._options.request_s))
            if partition and not found:
                await self._notices.absent("kv_list", partition)
            return found

        return Operation(work(), dict)

    def clear(self, keys: list[str] | str, partition_id: str) -> Operation[None, None]:
        keys = check_keys([keys] if isinstance(keys, str) else keys)
        command = Clear(check_partition(partition_id), keys=keys)

        async def work() -> None:
            done = await request_in_parts(self._engine, command, self._options.request_s)
            if done.absent:
                await self._notices.absent("kv_clear", partition_id)
            elif done.missing:
                self._notices.warn("kv_clear", partition_id, _not_found(done.missing, keys, partition_id))

        return Operation(work(), lambda _: None)

    # ---------------------------------------------------------------------------------------------- keys and metadata

    def retrieve_meta(
        self, keys: list[str] | str, partition_id: str, create: bool, strict: bool | None = None
    ) -> Operation[Batch, BatchMeta]:
        """``strict``: missing keys are an error; None: as the setting ``missing_fields`` says of fields."""
        keys = check_keys([keys] if isinstance(keys, str) else keys)
        check_partition(partition_id)
        check_flag("create", create)
        partial = self._options.missing_fields == "drop" if strict is None else not strict

        async def work() -> Batch:
            if create:
                commit = Commit(partition_id, keys=list(dict.fromkeys(keys)), wait_s=self._options.put_wait_s)
                await self._engine.put(None, commit, timeout_s=self._options.request_s)
            lookup = Lookup(partition_id, keys=keys, partial=partial, locate=False)
            try:
                batch = await self._engine.lookup(lookup, self._options.request_s)
            except KeyNotFoundError as error:
                raise KeyNotFoundError(f"{error}{await self._notices.hint(partition_id)}") from None
            if missing := len(keys) - len(batch.indexes) // 8:
                self._notices.warn("kv_retrieve_meta", partition_id, _not_found(missing, keys, partition_id))
            return batch

        return Operation(work(), lambda batch: batch_meta(batch, partition_id))

    def retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> Operation[Reply, list[str]]:
        indexes = [global_indexes] if type(global_indexes) is int else global_indexes
        if not isinstance(indexes, list) or not all(type(index) is int for index in indexes):
            raise InvalidTypeError("global_indexes must be an int or a list of ints")
        if not indexes:
            raise InvalidInputError("global_indexes is an empty list")
        check_partition(partition_id)
        return Operation(
            self._engine.request(KeysOf(partition_id, pack_indexes(indexes)), self._options.request_s), value_of
        )


class Cells:
    """Some fields of one row: ``blocks`` has each field, 0 where the row lacks it, ``values`` those that it has."""

    def __init__(self, blocks: dict[str, int], loaded: LoadedBatch | None) -> None:
        self.blocks = blocks
        self.loaded = loaded
        self.values: dict[str, Any] = {}

    def release(self) -> None:
        if self.loaded is not None:
            self.loaded.release()


def cell_blocks(batch: Batch, names: list[str]) -> dict[str, int]:
    """The block of each of these fields of the one row of a located batch; 0: it lacks the field."""
    found = dict.fromkeys(names, 0)
    for family in batch.locations:
        place = int.from_bytes(family.block_of_row[:4], "little", signed=True)
        if place >= 0:
            found.update((name, family.blocks[place]) for name in family.fields if name in found)
    return found


def _not_found(missing: int, keys: list[str], partition: str) -> str:
    return f"{missing} of the {len(keys)} keys {name_some(keys)} are not in partition {partition!r}"


def _lock_number(lock: object, partition_id: str, keys: list[str]) -> int:
    from transfer_queue.client.locks import GlobalLock

    if not isinstance(lock, GlobalLock):
        raise InvalidTypeError(f"lock must be what kv_global_lock gives, not {type(lock).__name__}")
    return lock.number_for(partition_id, keys)


def single_row(fields: dict[str, Any]) -> dict[str, Any]:
    """One row of plain values as columns: tensors get a batch axis, anything else is one opaque value."""
    import torch

    from transfer_queue.columns.tensor_bytes import check_storable

    row: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            if value.is_nested:
                raise InvalidInputError(f"field {name!r} is a nested tensor, which is many rows: use kv_batch_put")
            check_storable(value, f"field {name!r}")
            row[name] = value.unsqueeze(0)
        else:
            row[name] = [value]
    return row
