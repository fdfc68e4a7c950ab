"""Tensors on GPUs: straight between their memory and a unit's shared memory, at the speed of pinned copies."""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from transfer_queue.columns.column import Bytes, Chunk
from transfer_queue.columns.tensor_bytes import check_storable, tensor_to_bytes
from transfer_queue.errors import InvalidInputError, InvalidTypeError

__all__ = ["CudaBytes", "beside", "checked_device", "column_bytes", "complete_on", "pin", "streams_of"]

log = logging.getLogger(__name__)

_cuda: Any = torch.cuda
"""torch types only parts of it."""

_pinned: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_pinned_lock = threading.Lock()
_streams: dict[torch.device, torch.cuda.Stream] = {}


def checked_device(device: object) -> torch.device:
    """The device tensors are to come to: the CPU or a CUDA device with its number.

    Raises InvalidTypeError; InvalidInputError for another kind, a number that is not there, or CUDA where torch
    has none.
    """
    if isinstance(device, bool) or not isinstance(device, str | int | torch.device):
        raise InvalidTypeError(f"device must be a torch.device, its name or its number, not {type(device).__name__}")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise InvalidInputError(f"device {device!r} is unknown: {str(error).splitlines()[0]}") from None
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise InvalidInputError(f"device {device!r} is not served; use 'cpu' or 'cuda' and move the tensors yourself")
    if not torch.cuda.is_available():
        raise InvalidInputError(
            f"device {device!r}: torch finds no CUDA device here; use device='cpu', or install a CUDA build of torch "
            "on a machine with a GPU"
        )
    number = torch.cuda.current_device() if found.index is None else found.index
    if not 0 <= number < torch.cuda.device_count():
        raise InvalidInputError(f"device {device!r}: there are {torch.cuda.device_count()} CUDA devices here")
    return torch.device("cuda", number)


def column_bytes(tensor: torch.Tensor, where: str) -> Chunk:
    """Like ``tensor_to_bytes``, but the elements of a CUDA tensor stay on the GPU until the block is written."""
    if tensor.device.type != "cuda" or tensor.layout is not torch.strided or not tensor.numel():
        return tensor_to_bytes(tensor, where)
    check_storable(tensor, where)
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return CudaBytes(flat, _recorded(flat.device))


class CudaBytes:
    """See ``column.DeviceBytes``. ``written``: the caller's stream has produced the elements; None: they are there."""

    def __init__(self, flat: torch.Tensor, written: torch.cuda.Event | None = None) -> None:
        self._flat = flat
        self._written = written

    @property
    def device(self) -> torch.device:
        return self._flat.device

    @property
    def nbytes(self) -> int:
        return self._flat.nbytes

    @property
    def data(self) -> memoryview:
        host = np.empty(self.nbytes, np.uint8)
        self.copy_into(host)
        return host.data

    def __getitem__(self, part: slice) -> CudaBytes:
        return CudaBytes(self._flat[part], self._written)

    def copy_into(self, target: Bytes) -> None:
        """Wait for the elements and for their copy; other streams go on meanwhile."""
        pin(target)
        with beside(self._flat.device):
            self.copy_to(torch.from_numpy(target))

    def copy_to(self, target: torch.Tensor) -> None:
        """Enqueue a copy to a flat uint8 tensor on the current stream of the GPU."""
        if self._written is not None:
            torch.cuda.current_stream(self._flat.device).wait_event(self._written)
        target.copy_(self._flat, non_blocking=True)


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Copies enqueued here do not wait for what the program computes on ``device``; they are complete at the end."""
    if device.type != "cuda":
        yield
        return
    stream = _streams.get(device)
    if stream is None:
        stream = _streams.setdefault(device, _cuda.Stream(device))
    with torch.cuda.stream(stream):
        yield
        done = _recorded(device)
    done.synchronize()


def _recorded(device: torch.device) -> torch.cuda.Event:
    """An event at the end of the current stream."""
    event: torch.cuda.Event = _cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def streams_of(tensors: Iterable[object]) -> tuple[torch.cuda.Stream, ...]:
    """The caller's current stream on each CUDA device that has some of ``tensors``."""
    devices = {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda"}
    return tuple(torch.cuda.current_stream(device) for device in devices)


@contextmanager
def complete_on(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Work is enqueued on ``streams`` and is complete at the end: the memory it reads may be recycled from then on."""
    with ExitStack() as entered:
        for stream in streams:
            entered.callback(stream.synchronize)
            entered.enter_context(torch.cuda.stream(stream))
        yield


def pin(array: Bytes) -> None:
    """Register the mapped file that ``array`` lies in with CUDA, once; nothing to do for other memory.

    Where that is refused, for example by a limit on locked memory, copies still work, at the speed of pageable memory.
    """
    owner = _mapped_file(array)
    if owner is None or owner in _pinned:
        return
    with _pinned_lock:
        if owner in _pinned:
            return
        whole = np.frombuffer(owner, np.uint8)
        address, nbytes = whole.ctypes.data, whole.nbytes
        runtime = _cuda.cudart()
        code = int(runtime.cudaHostRegister(address, nbytes, 0))
        if code == 0:
            weakref.finalize(owner, runtime.cudaHostUnregister, address).atexit = False
        else:
            log.warning("CUDA does not register %d bytes of shared memory (error %d); copies are slower", nbytes, code)
        _pinned.add(owner)


def _mapped_file(array: Bytes) -> mmap.mmap | None:
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return owner if isinstance(owner, mmap.mmap) else None
