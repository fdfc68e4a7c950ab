"""Load on a queue: every row carries its number, so that what was lost, doubled or damaged can be counted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.config.attach import AttachConfig
from transfer_queue.errors import DataLostError, StorageKeyNotFoundError, TransferQueueError

__all__ = ["Load", "percentile"]

ROWS = int(os.environ.get("TQ_CHAOS_ROWS", "4"))
"""Of a put, and of a get."""
WIDTH = 64
GET_S = 60.0
PARTITION = "load"


@dataclass
class Load:
    """``writers`` threads put, ``readers`` threads fetch as one task, each with a client of its own."""

    address: str | AttachConfig
    writers: int = 2
    readers: int = 2
    partition: str = PARTITION
    lease_s: float = 0.0
    """More than 0: rows count as delivered once they are acknowledged."""
    pause_s: float = 0.0
    """How long a reader takes for a batch."""
    together: bool = False
    """All threads use one client, so that its requests are under way at the same time."""
    lossy: bool = False
    """Rows may be lost with what holds them, if a get says so."""
    acknowledged: list[int] = field(default_factory=list)
    """Rows whose put returned."""
    delivered: list[int] = field(default_factory=list)
    """Rows that a fetch returned, as often as it did."""
    indexes: set[int] = field(default_factory=set)
    """Global indexes of the delivered rows."""
    wrong: list[int] = field(default_factory=list)
    """Rows whose bytes were not what was put."""
    errors: list[str] = field(default_factory=list)
    """Fetches and gets that failed: what they took is lost to the task."""
    lost: set[int] = field(default_factory=set)
    """Global indexes of the rows that a get reported lost."""
    refused: list[str] = field(default_factory=list)
    """Puts that raised, so that their rows were not acknowledged."""
    progress: list[float] = field(default_factory=list)
    """When each put was acknowledged, on the monotonic clock."""

    def __post_init__(self) -> None:
        self._writing = threading.Event()
        self._reading = threading.Event()
        self._lock = threading.Lock()
        self._next = 0
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Load:
        self._shared = tq.TransferQueueClient("together", self.address) if self.together else None
        for number in range(self.writers):
            self._start(self._write, f"writer-{number}")
        for number in range(self.readers):
            self._start(self._read, f"reader-{number}")
        return self

    def __exit__(self, *problem: object) -> None:
        self._writing.set()
        self._reading.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), thread.name
        if self._shared is not None:
            self._shared.close()

    @contextmanager
    def _client(self, name: str) -> Iterator[tq.TransferQueueClient]:
        if self._shared is not None:
            yield self._shared
            return
        client = tq.TransferQueueClient(name, self.address)
        try:
            yield client
        finally:
            client.close()

    def drain(self, timeout_s: float = 120.0) -> None:
        """Stop writing and wait until all acknowledged rows were delivered, or for ``timeout_s`` without progress."""
        self._writing.set()
        for thread in self._threads[: self.writers]:
            thread.join(timeout_s)
        seen, since = -1, time.monotonic()
        while set(self.acknowledged) - set(self.delivered) and not self.errors:
            if len(self.delivered) != seen:
                seen, since = len(self.delivered), time.monotonic()
            if time.monotonic() - since > timeout_s:
                return
            self._reading.wait(0.05)

    def _start(self, work: object, name: str) -> None:
        thread = threading.Thread(target=work, args=(name,), name=name)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _write(self, name: str) -> None:
        with self._client(name) as client:
            while not self._writing.is_set():
                with self._lock:
                    first, self._next = self._next, self._next + ROWS
                rows = torch.arange(first, first + ROWS)
                data = TensorDict({"number": rows, "x": rows[:, None].expand(ROWS, WIDTH).clone()}, batch_size=[ROWS])
                try:
                    client.put(data, partition_id=self.partition)
                except TransferQueueError as error:
                    self.refused.append(f"{type(error).__name__}: {error}")
                    continue
                self.progress.append(time.monotonic())
                self.acknowledged.extend(rows.tolist())

    def _read(self, name: str) -> None:
        with self._client(name) as client:
            while not self._reading.is_set():
                try:
                    meta = client.get_meta(
                        ["number", "x"], ROWS, self.partition, task_name="train", timeout=0.5, lease=self.lease_s
                    )
                    if not meta.size:
                        continue
                except TimeoutError:
                    continue
                except TransferQueueError as error:
                    self.errors.append(f"fetch: {type(error).__name__}: {error}")
                    continue
                self._take(client, meta)

    def _take(self, client: tq.TransferQueueClient, meta: tq.BatchMeta) -> None:
        got = None
        deadline = time.monotonic() + GET_S
        while got is None:
            try:
                got = client.get_data(meta)
            except TransferQueueError as error:  # its unit is away for longer than one get waits
                if self.lossy and isinstance(error, DataLostError | StorageKeyNotFoundError):
                    self.lost.update(meta.global_indexes)
                    return
                if time.monotonic() > deadline:
                    self.errors.append(f"get: {type(error).__name__}: {error}")
                    return
        numbers = got["number"].tolist()
        sound = (torch.stack(list(got["x"].unbind())) == got["number"][:, None]).all(dim=1).tolist()
        self.wrong.extend(number for number, right in zip(numbers, sound, strict=True) if not right)
        if self.lease_s:
            self._acknowledge(client, meta)
        self.delivered.extend(numbers)
        self.indexes.update(meta.global_indexes)
        self._reading.wait(self.pause_s)
        client.clear_samples(meta)

    def _acknowledge(self, client: tq.TransferQueueClient, meta: tq.BatchMeta) -> None:
        try:
            client.ack(meta, "train")
        except TransferQueueError as error:
            self.errors.append(f"ack: {type(error).__name__}: {error}")


def percentile(values: list[float], share: float) -> float:
    """The value that ``share`` of them do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
