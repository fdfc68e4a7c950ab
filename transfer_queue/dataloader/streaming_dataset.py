"""A torch dataset over a partition that is still being written."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDict
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from transfer_queue._kv_meta import as_positions
from transfer_queue.backoff import Backoff
from transfer_queue.client.arguments import check_fields, check_flag, check_lease, check_partition, check_text
from transfer_queue.client.client import Client
from transfer_queue.config.attach import AttachConfig, attach_from_environment
from transfer_queue.control.puts import did_you_mean
from transfer_queue.dataloader.batches import WAIT_S, chunk_batch_fn, default_fetch_batch_fn, fetch_batch
from transfer_queue.dataloader.end_marker import production_ended
from transfer_queue.errors import (
    ConfigError,
    DataLostError,
    InvalidInputError,
    InvalidTypeError,
    NotInitializedError,
    RequestError,
    SamplerError,
)
from transfer_queue.lifecycle import current_client, get_client, open_client, queue_named_by
from transfer_queue.metadata import BatchMeta

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["Cursor", "Sample", "StreamingDataset"]

log = logging.getLogger(__name__)

Sample = tuple[TensorDict, BatchMeta]
FetchFn = Callable[..., "tuple[TensorDict | None, BatchMeta]"]
ProcessFn = Callable[..., Iterable[Sample]]

_FIRST_PAUSE_S = 0.01
_TURN_PAUSE_S = 0.002
_STALL_WARNING_S = 10.0
"""Time after which a waiting dataset logs the reason; the time doubles after each warning."""


def _refuse_to_collate(*arguments: Any, **options: Any) -> Any:
    raise InvalidTypeError(
        "a StreamingDataset yields whole micro-batches, which torch's DataLoader must not join: iterate "
        "StreamingDataLoader(dataset), or DataLoader(dataset, batch_size=None)"
    )


class _MicroBatch(tuple[Any, ...]):
    """A micro-batch. Its class is the mark by which torch's DataLoader does not join it with others."""


default_collate_fn_map[_MicroBatch] = _refuse_to_collate


class Cursor(NamedTuple):
    """Next delivery: micro-batch ``micro`` of batch ``batch``."""

    batch: int
    micro: int


class StreamingDataset(IterableDataset[Any]):
    """Micro-batches ``(TensorDict, BatchMeta)`` of the rows of a partition as they become ready, for one task.

    With `RankAwareSampler`, or another sampler that remembers batches, processes of equal ``dp_rank`` see identical
    batches in the same order. A batch that was fetched by a process which dies is fetched again by its number.

    The stream ends

    - after ``total_samples`` rows, if given;
    - after the producers marked the partition's end (`mark_end`, or ``put(is_last=True)``) and the task consumed all
      its rows; the last batch may be short. Too few rows for ``total_samples`` raise RequestError;
    - with ``should_check_consumption_status``, once the task has consumed every row that exists at that moment.

    Otherwise it waits for rows. A new iteration continues after the last micro-batch; ``reset`` and ``step`` move the
    position.

    Args:
        config: The settings that ``init`` returned, or others that name a queue. Where they name none, the queue of
            this process's client or of the environment. The iterating process connects on first use.
        batch_size: Rows of a fetch.
        micro_batch_size: Rows of a micro-batch, into which a fetch is divided.
        data_fields: The fields to read.
        partition_id: The partition.
        task_name: The task that consumes the rows.
        dp_rank: Data-parallel rank of this process.
        should_check_consumption_status: End the stream as described above.
        fetch_batch_fn: Replaces `default_fetch_batch_fn`.
        process_batch_fn: Replaces `chunk_batch_fn`.
        total_samples: Rows of this ``dp_rank`` in a partition, so that ranks take equal shares.
        lease: Seconds for a batch. Above 0 rows are delivered at least once, see ``TransferQueueClient.get_meta``: a
            batch is acknowledged when the next one is requested. An unfinished batch of a process that dies is
            delivered again to a process of the task. With worker processes a worker may request its next batch before
            the loader's process has received this one.

    Raises:
        InvalidInputError: An argument is out of range; also a ValueError.
        InvalidTypeError: An argument has the wrong type.

    Example:
        >>> dataset = StreamingDataset(None, 8, 2, ["tokens"], "train", "update", dp_rank=0, total_samples=64)
        >>> for batch, meta in StreamingDataLoader(dataset):
        ...     step(batch["tokens"])
    """

    def __init__(
        self,
        config: DictConfig | Mapping[str, Any] | AttachConfig | None,
        batch_size: int,
        micro_batch_size: int,
        data_fields: Sequence[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: FetchFn | None = None,
        process_batch_fn: ProcessFn | None = None,
        *,
        total_samples: int | None = None,
        lease: float | None = None,
    ) -> None:
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("micro_batch_size", micro_batch_size, 1),
            ("dp_rank", dp_rank, 0),
            ("total_samples", 0 if total_samples is None else total_samples, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidTypeError(f"{name} must be an int, not {type(value).__name__}")
            if value < least:
                raise InvalidInputError(f"{name} must be greater than or equal to {least}; got {value}")
        if isinstance(data_fields, str) or not data_fields:
            raise InvalidInputError(f"data_fields must be a list of at least one field name; got {data_fields!r}")
        check_fields("data_fields", data_fields)
        check_partition(partition_id)
        if not check_text("task_name", task_name):
            raise InvalidInputError("task_name must not be empty: consumption is counted per task")
        check_flag("should_check_consumption_status", should_check_consumption_status)
        for name, function in (("fetch_batch_fn", fetch_batch_fn), ("process_batch_fn", process_batch_fn)):
            if function is not None and not callable(function):
                raise InvalidTypeError(f"{name} must be a function, not {type(function).__name__}")
        if process_batch_fn is None and micro_batch_size > batch_size:
            raise InvalidInputError(f"micro_batch_size {micro_batch_size} is larger than batch_size {batch_size}")
        self.config = config
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = list(data_fields)
        self.partition_id = partition_id
        self.task_name = task_name
        self.dp_rank = dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn: FetchFn = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn: ProcessFn = process_batch_fn or chunk_batch_fn
        self.total_samples = total_samples
        self.lease = check_lease("lease", lease)
        self.cursor = Cursor(0, 0)
        self.moves = 0
        """Counts ``reset``, ``step`` and ``load_state_dict``."""
        self.shared: torch.Tensor | None = None
        """With worker processes, int64 ``(2,)`` that they share: not 0 when they shall end; the batch that is next."""
        self._buffer: dict[int, Sample] = {}
        self._unacknowledged: BatchMeta | None = None
        """The batch that is being worked on."""
        self._told_empty = ""
        """The partition for which `tell_empty` has logged a warning."""
        self._own_client: Client | None = None
        self._attach = self._find_queue()

    # -------------------------------------------------------------------------------------------------- the position

    @property
    def buffer(self) -> list[Sample]:
        """The batches fetched from this partition so far, for ``reset``; empty where workers fetch them."""
        return [self._buffer[number] for number in sorted(self._buffer)]

    def reset(self) -> None:
        """Replay the partition from its first batch."""
        self._move(Cursor(0, 0))

    def step(self, partition_id: str) -> None:
        """Drop the buffer and go on with another partition."""
        self.partition_id = check_partition(partition_id)
        self._buffer = {}
        self._move(Cursor(0, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered micro-batch, as plain values."""
        return {
            "version": 1,
            **self._identity(),
            "partition_id": self.partition_id,
            "cursor": list(self.cursor),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another dataset of the same task, rank and sizes stood.

        Batches fetched but not delivered then are fetched again by number: the sampler must remember them, as
        `RankAwareSampler` does, and their rows must not have been cleared. Raises InvalidInputError, InvalidTypeError;
        then nothing changed.
        """
        if not isinstance(state, Mapping):
            raise InvalidTypeError(f"state must be a dict as state_dict() returns it, not {type(state).__name__}")
        if state.get("version") != 1:
            raise InvalidInputError(f"state has version {state.get('version')!r}; this release reads version 1")
        for name, own in self._identity().items():
            if state.get(name) != own:
                raise InvalidInputError(f"state is of {name} {state.get(name)!r}; this dataset has {own!r}")
        cursor = as_positions("cursor of state", state.get("cursor", ()))
        if len(cursor) != 2 or min(cursor) < 0:
            raise InvalidInputError(f"state has cursor {cursor}; it is a batch and a micro-batch, counted from 0")
        self.step(check_partition(state.get("partition_id")))
        self._move(Cursor(*cursor))

    def _identity(self) -> dict[str, Any]:
        names = ("task_name", "dp_rank", "batch_size", "micro_batch_size")
        return {name: getattr(self, name) for name in names}

    def _move(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.moves += 1

    # ----------------------------------------------------------------------------------------------------- iterating

    def __iter__(self) -> Iterator[Any]:
        """Micro-batches; in a worker process of a StreamingDataLoader ``(batch number, its micro-batches)``."""
        info = get_worker_info()
        if info is not None:
            yield from self._batches_of_worker(info.id, info.num_workers)
            return
        first = self.cursor
        while True:
            cursor, moves = self.cursor, self.moves
            batch = self._buffer.get(cursor.batch) or self._await_batch(cursor.batch, lambda: False)
            if batch is None:
                if cursor == first:
                    self.tell_empty()
                return
            self._buffer[cursor.batch] = batch
            self.cursor = Cursor(cursor.batch + 1, 0)
            for micro, (piece, last) in enumerate(_marking_last(self._divide(batch))):
                if micro >= cursor.micro:
                    self.cursor = Cursor(cursor.batch + 1, 0) if last else Cursor(cursor.batch, micro + 1)
                    yield _MicroBatch(piece) if type(piece) is tuple else piece
                    if self.moves != moves:
                        break

    def tell_empty(self) -> None:
        """Log once for a partition why an iteration yields nothing."""
        if self._told_empty == self.partition_id:
            return
        self._told_empty = self.partition_id
        counts = self.client.run(self.client.rows.partition_counts, self.partition_id)
        again = "reset() of this dataset replays its batches"
        if not counts or not counts["rows"]:
            found = "the partition has no rows"
        elif self.total_samples is not None and self.cursor.batch * self.batch_size >= self.total_samples:
            found = f"it has delivered its total_samples={self.total_samples} rows; {again}"
        else:
            found = (
                f"task {self.task_name!r} has taken all rows of partition {self.partition_id!r}; "
                f"reset_consumption({self.partition_id!r}, {self.task_name!r}) of the client gives them again, {again}"
            )
        log.warning("%s yields nothing: %s", self, found)

    def _batches_of_worker(self, worker: int, workers: int) -> Iterator[tuple[int, list[Sample]]]:
        """Every ``workers``-th batch. Workers draw in turn, so that batches come in the order of one process."""
        shared, parent = self.shared, os.getppid()
        if shared is None:
            raise InvalidInputError("a StreamingDataset needs StreamingDataLoader for worker processes")

        def stopped() -> bool:
            return bool(shared[0]) or os.getppid() != parent

        for number in itertools.count(self.cursor.batch + worker, workers):
            while int(shared[1]) < number and not stopped():
                time.sleep(_TURN_PAUSE_S)
            batch = self._await_batch(number, stopped)
            if batch is None:
                shared[0] = 1  # no later batch either
                return
            shared[1] = number + 1
            yield number, list(self._divide(batch))

    def _divide(self, batch: Sample) -> Iterable[Sample]:
        td, meta = batch
        size = self.micro_batch_size
        if self.process_batch_fn is chunk_batch_fn:
            size = min(size, len(meta))  # the last batch of a stream may be short
        pieces = self.process_batch_fn(td, meta, micro_batch_size=size)
        if not isinstance(pieces, Iterable):
            raise InvalidTypeError(f"process_batch_fn must return micro-batches, not {type(pieces).__name__}")
        return pieces

    # ------------------------------------------------------------------------------------------------------ fetching

    def _await_batch(self, number: int, stopped: Callable[[], bool]) -> Sample | None:
        """Batch ``number`` of this rank, after acknowledging the one before; None at the end of the stream or when
        stopped."""
        if self._unacknowledged is not None:
            done, self._unacknowledged = self._unacknowledged, None
            # Not strict: consumption may have been reset meanwhile, and then the rows are to be delivered again.
            self.client.run(self.client.rows.acknowledge, done, self.task_name, False)
        size = self.batch_size
        if self.total_samples is not None:
            size = min(size, self.total_samples - number * self.batch_size)
            if size <= 0:
                return None
        backoff = Backoff(_FIRST_PAUSE_S, _longest_pause_s())
        began, patience = time.monotonic(), _STALL_WARNING_S
        while not stopped():
            asked = time.monotonic()
            batch = self._fetch(number, size, WAIT_S)
            if batch is not None:
                return batch
            if production_ended(self.client, self.partition_id):
                found, ended = self._rest(number, size)
                if found is not None or ended:
                    return found
            elif self.should_check_consumption_status and self.client.check_consumption_status(
                self.task_name, self.partition_id
            ):
                return self._fetch(number, size, 0)  # a process of this rank may have drawn it meanwhile
            if time.monotonic() - began > patience:
                log.warning("%s has waited %.0f s for %d rows: %s", self, patience, size, self._awaited(size))
                patience *= 2
            if time.monotonic() - asked < WAIT_S / 2:  # polling mode: the controller does the waiting otherwise
                time.sleep(backoff.next_s())
        return None

    def _rest(self, number: int, size: int) -> tuple[Sample | None, bool]:
        """Fetch after production ended: (a last, perhaps short batch, whether the stream is over)."""
        unconsumed, ready = self._left()
        if unconsumed == 0 or (self.total_samples is not None and unconsumed < size):
            found = self._fetch(number, size, 0)  # a process of this rank may have drawn it before we looked
            if found is None and self.total_samples is not None:
                raise RequestError(
                    f"{self}: the partition ended with {unconsumed} rows left where batch {number} needs {size} to "
                    f"reach total_samples={self.total_samples}; lower total_samples or mark the end later"
                )
            return found, True
        if ready < unconsumed:
            self._refuse_lost(unconsumed, ready)
        if ready < unconsumed or unconsumed >= size:
            return None, False  # fields are still to come, or there is enough for a whole batch
        refusals: list[SamplerError] = []
        for rows in range(unconsumed, 0, -1):  # a sampler may need a multiple, or as many again for other ranks
            try:
                found = self._fetch(number, rows, 0)
            except SamplerError as error:
                refusals.append(error)
                continue
            if found is not None:
                return found, False
        if len(refusals) == unconsumed and self._left()[0] == unconsumed:
            raise SamplerError(f"{self}: the sampler does not hand out the last {unconsumed} rows: {refusals[0]}")
        return None, False

    def _refuse_lost(self, unconsumed: int, ready: int) -> None:
        """Raise DataLostError if the rows that lack fields are lost: no producer writes them after the end."""
        counts = self.client.run(self.client.rows.partition_counts, self.partition_id)
        lost = counts["lost"] - (counts["rows"] - unconsumed) if counts else 0  # at least as many of those to come
        if lost >= unconsumed - ready:
            raise DataLostError(
                f"{self}: {counts['lost']} rows are lost with their storage unit; clear the partition and put its rows "
                "again, or keep rows over the end of a unit with controller.durability"
            )

    def _awaited(self, size: int) -> str:
        """Describe which rows of a batch of ``size`` rows the partition has."""
        counts = self.client.run(self.client.rows.partition_counts, self.partition_id)
        if not counts:
            return "there is no such partition; put rows into it"
        unwritten = [name for name in self.data_fields if name not in counts["fields"]]
        if unwritten:
            hint = did_you_mean(unwritten, counts["fields"])
            return f"no row of it has the fields {unwritten}; it has {sorted(counts['fields'])}{hint}"
        unconsumed, ready = self._left()
        found = f"it has {counts['rows']} rows, {unconsumed} not consumed, {ready} of these with all fields"
        if counts["lost"]:
            found += f", {counts['lost']} lost with their storage unit"
        if ready >= size:
            return f"{found}; the sampler gives this rank none of them"
        return f"{found}; producers put more, or end it by mark_end or put(is_last=True)"

    def _left(self) -> tuple[int, int]:
        """(rows the task has not consumed, how many of them have all fields)."""
        indexes, consumed = self.client.get_consumption_status(self.task_name, self.partition_id)
        if indexes is None or consumed is None:
            return 0, 0
        left = set(indexes[consumed == 0].tolist())
        produced, status = self.client.get_production_status(self.data_fields, self.partition_id)
        if produced is None or status is None:
            return len(left), 0
        return len(left), len(left.intersection(produced[(status == 1).all(dim=1)].tolist()))

    def _fetch(self, number: int, rows: int, wait_s: float) -> Sample | None:
        sampling_config = {
            "dp_rank": self.dp_rank,
            "task_name": self.task_name,
            "batch_index": number,
            "partition_id": self.partition_id,
        }
        if self.fetch_batch_fn is default_fetch_batch_fn:
            td, meta = fetch_batch(
                self.client,
                self.data_fields,
                rows,
                self.partition_id,
                self.task_name,
                sampling_config,
                wait_s,
                self.lease,
            )
        else:
            found = self.fetch_batch_fn(
                tq_client=self.client,
                data_fields=self.data_fields,
                batch_size=rows,
                partition_id=self.partition_id,
                task_name=self.task_name,
                sampling_config=sampling_config,
                batch_index=number,
            )
            if not isinstance(found, tuple) or len(found) != 2:
                raise InvalidTypeError(f"fetch_batch_fn must return (TensorDict or None, BatchMeta), not {found!r:.80}")
            td, meta = found
        if td is None:
            return None
        if (self.client.default_lease if self.lease is None else self.lease) > 0:
            self._unacknowledged = meta
        return td, meta

    # --------------------------------------------------------------------------------------------------- connecting

    @property
    def client(self) -> Client:
        """This process's client if it is one of the same queue, else one of the dataset's own."""
        self._attach = self._attach or self._find_queue()
        if self._attach is None:
            return current_client()  # raises, and says how to get one
        try:
            shared = get_client()
        except NotInitializedError:
            shared = None
        if shared is not None and shared.config == self._attach:
            return shared
        if self._own_client is None:
            self._own_client = open_client(f"StreamingDataset_{os.getpid()}", self._attach)
        return self._own_client

    def close(self) -> None:
        """Give up the connection, if it is the dataset's own. Idempotent."""
        if self._own_client is not None:
            self._own_client.close()
            self._own_client = None

    def _find_queue(self) -> AttachConfig | None:
        if isinstance(self.config, AttachConfig):
            return self.config
        named = queue_named_by(self.config)
        if named is not None:
            return named
        try:
            return get_client().config
        except NotInitializedError:
            return attach_from_environment()

    def __getstate__(self) -> dict[str, Any]:
        """State for worker processes: the address of the queue, without connection and data."""
        return {
            **self.__dict__,
            "config": None,  # may hold a user's sampler
            "_attach": self._attach or self._find_queue(),
            "_own_client": None,
            "_buffer": {},
            "_unacknowledged": None,
        }

    def __repr__(self) -> str:
        return f"StreamingDataset(partition {self.partition_id!r}, task {self.task_name!r}, dp_rank {self.dp_rank})"


def _marking_last(pieces: Iterable[Sample]) -> Iterator[tuple[Sample, bool]]:
    """Each piece, and whether it is the last one."""
    held: Sample | None = None
    for piece in pieces:
        if held is not None:
            yield held, False
        held = piece
    if held is not None:
        yield held, True


def _longest_pause_s() -> float:
    name = "TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL"
    text = os.environ.get(name, "1")
    try:
        return max(float(text), _FIRST_PAUSE_S)
    except ValueError:
        raise ConfigError(f"environment variable {name}: {text!r} is not a number of seconds") from None
