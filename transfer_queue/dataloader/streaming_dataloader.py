"""A torch loader over a streaming dataset: worker processes, prefetch, and a position to stop and resume at."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from multiprocessing.connection import wait
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from transfer_queue.dataloader.streaming_dataset import Cursor, Sample, StreamingDataset
from transfer_queue.errors import InvalidTypeError, WorkerLostError

__all__ = ["StreamingDataLoader"]

_END_S = 1.0
_NOTICE_S = 1.0
"""Interval at which a waiting loader checks whether a worker has ended."""
_LOST = "DataLoader worker"
"""Beginning of torch's error for a worker that ended."""


class StreamingDataLoader(DataLoader[Any]):
    """Yields what ``dataset`` yields, or what ``collate_fn`` makes of each ``(TensorDict, BatchMeta)``.

    With ``num_workers`` worker processes batch ``n`` is fetched by worker ``n % num_workers``, ``prefetch_factor``
    batches ahead; the order is that of one process, so that ranks of a group see the same. A worker that dies is a
    WorkerLostError; iterating again goes on with the first micro-batch that was not delivered, as after a break or an
    exception in the loop's body. ``persistent_workers`` is accepted and has no effect: each pass starts its workers at
    the current position.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[[Sample], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        if not isinstance(dataset, StreamingDataset):
            raise InvalidTypeError(f"dataset must be a StreamingDataset, not {type(dataset).__name__}")
        self.stream = dataset
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=cast(Any, _Collate(collate_fn)),
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=False,
            pin_memory_device=pin_memory_device,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        while (yield from self._pass()):
            pass

    def _pass(self) -> Generator[Any, None, bool]:
        """Yield until the stream ends; return whether to start again because the dataset was moved."""
        stream = self.stream
        start, moves = stream.cursor, stream.moves
        shared = stream.shared = _shared_state(start.batch) if self.num_workers else None
        inner: Iterator[Any] = super().__iter__()
        try:
            while True:
                try:
                    received = next(inner)
                except StopIteration:
                    if self.num_workers and stream.cursor == start:
                        stream.tell_empty()
                    return False
                except (OSError, EOFError) as error:
                    if ended := _ended(inner):
                        raise RuntimeError(f"{_LOST} (pid {ended}) exited unexpectedly: {error}") from error
                    raise
                number, samples = received if self.num_workers else (0, [received])
                for micro, sample in enumerate(samples):
                    if self.num_workers:
                        if number == start.batch and micro < start.micro:
                            continue
                        last = micro + 1 == len(samples)
                        stream.cursor = Cursor(number + 1, 0) if last else Cursor(number, micro + 1)
                    yield sample
                    if stream.moves != moves:
                        return True
        except RuntimeError as error:  # torch's, which comes wherever this process is when a worker ends, or that above
            if str(error).startswith(_LOST):
                raise WorkerLostError(f"{error}; iterate again to go on after the last micro-batch") from error
            raise
        finally:
            if shared is not None:
                shared[0] = 1
            del inner

    def _get_iterator(self) -> Any:
        return _Workers(self) if self.num_workers else super()._get_iterator()

    def reset(self) -> None:
        """See `StreamingDataset.reset`."""
        self.stream.reset()

    def step(self, partition_id: str) -> None:
        """See `StreamingDataset.step`."""
        self.stream.step(partition_id)

    def get_buffer(self) -> list[Sample]:
        """See `StreamingDataset.buffer`."""
        return self.stream.buffer

    def state_dict(self) -> dict[str, Any]:
        """See `StreamingDataset.state_dict`; what workers fetched ahead counts as not delivered."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `StreamingDataset.load_state_dict`. ``num_workers`` may differ."""
        self.stream.load_state_dict(state)


class _Workers(_MultiProcessingDataLoaderIter):
    """torch's worker processes. Only the thread that iterates notices their end.

    torch keeps the pids of workers for a handler of SIGCHLD, which raises at any line of the program's main thread,
    even after the error that this loader raises, and even if another thread iterates.
    """

    _worker_pids_set: bool

    def __init__(self, loader: StreamingDataLoader) -> None:
        super().__init__(loader)
        cast(Any, signal_handling)._remove_worker_pids(id(self))
        self._worker_pids_set = False

    def _try_get_data(self, timeout: float = _NOTICE_S) -> Any:
        return cast(Any, super())._try_get_data(timeout)


def _shared_state(batch: int) -> torch.Tensor:
    """See `StreamingDataset.shared`."""
    state = torch.tensor([0, batch], dtype=torch.int64, device="cpu")
    return cast(torch.Tensor, cast(Any, state).share_memory_())


def _ended(iterator: Any) -> str:
    """Pids of the workers that have ended. A connection that breaks while a batch is handed over is seen up to a second
    before the end itself."""
    workers = getattr(iterator, "_workers", [])
    wait([worker.sentinel for worker in workers], timeout=_END_S)
    for worker in workers:
        if wait([worker.sentinel], timeout=0):  # a process closes it shortly before it ends
            worker.join(_END_S)
    return ", ".join(str(worker.pid) for worker in workers if not worker.is_alive())


class _Collate:
    """Runs the user's collate function on each micro-batch, in the worker if there are any."""

    def __init__(self, collate_fn: Callable[[Sample], Any] | None) -> None:
        self.collate_fn = collate_fn

    def __call__(self, received: Any) -> Any:
        function = self.collate_fn
        if function is None:
            return received
        if get_worker_info() is None:
            return function(received)
        number, samples = received
        return number, [function(sample) for sample in samples]
