"""Blocks that stay in the memory of a GPU: written there, mapped by other processes with CUDA IPC, read from there."""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from transfer_queue.columns.block import MOST_HEAD_BYTES, BlockView, EncodedBlock
from transfer_queue.columns.column import Bytes, ColumnView
from transfer_queue.columns.device import CudaBytes, beside
from transfer_queue.columns.tensor_bytes import tensor_from_bytes
from transfer_queue.errors import InvalidInputError

__all__ = [
    "DeviceBlockView",
    "DeviceMemory",
    "Shared",
    "device_number",
    "device_of",
    "map_handle",
    "own_memory",
    "release_handle",
]

log = logging.getLogger(__name__)

_HEAD_BYTES = 4096
"""Fetched first of a block; most heads fit."""

_own: weakref.WeakValueDictionary[str, DeviceMemory] = weakref.WeakValueDictionary()
"""Memory of this process by its name: CUDA does not map what the process itself exported."""
_opening = threading.Lock()


class Shared(NamedTuple):
    """By what another process knows whether it can map memory of a GPU; plain values."""

    name: str
    uuid: str
    """Of the GPU: a process that sees it is on the same machine."""
    nbytes: int


class DeviceMemory:
    """``nbytes`` bytes of a GPU, in one piece, for the blocks of this process."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        """Raises InvalidInputError if the GPU has not as much left."""
        try:
            self.flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise InvalidInputError(
                f"placement 'device': {device} has no {nbytes} bytes left for blocks; set TQ_DEVICE_MEMORY to less, or "
                f"free memory there: {str(error).splitlines()[0]}"
            ) from None
        if self.flat.is_cuda:
            torch.cuda.synchronize(device)  # what used this memory before may still run, on a stream of its own
        self.name = secrets.token_hex(8)
        self.nbytes = nbytes
        _own[self.name] = self

    @property
    def label(self) -> str:
        """The GPU, for people."""
        return f"{self.flat.device} ({_properties(self.flat.device).name})"

    @property
    def shared(self) -> Shared:
        """For processes that ask whether they can map it."""
        return Shared(self.name, str(_properties(self.flat.device).uuid), self.nbytes)

    def export(self) -> list[Any]:
        """A handle of torch's CUDA IPC for one more process; empty where CUDA does not export the memory.

        The GPU's memory is freed after its reader has unmapped it, or given the handle to `release_handle`.
        """
        try:
            return list(self.flat.untyped_storage()._share_cuda_())
        except RuntimeError as error:
            log.warning("blocks on %s are sent to other processes, as CUDA does not share them: %s", self.label, error)
            return []

    def close(self) -> None:
        """Free the memory, as soon as no copy from it is under way and no other process maps it."""
        self.flat = self.flat.new_empty(0)

    def write(self, block: EncodedBlock, start: int) -> None:
        """Write ``block`` at byte ``start``; returns when it is there."""
        flat = self.flat
        with beside(flat.device):
            for offset, chunk in block.places():
                target = flat[start + offset : start + offset + chunk.nbytes]
                if isinstance(chunk, CudaBytes):
                    chunk.copy_to(target)
                elif isinstance(chunk, np.ndarray) and chunk.nbytes:
                    target.copy_(tensor_from_bytes(chunk, torch.uint8, [chunk.nbytes]))

    def read(self, start: int, nbytes: int) -> Bytes:
        """A copy in the memory of the host."""
        return _to_host(self.flat[start : start + nbytes])


def own_memory(shared: Shared) -> torch.Tensor | None:
    """The memory as a flat uint8 tensor, if it is this process's own."""
    own = _own.get(shared.name)
    return None if own is None else own.flat


def device_number(shared: Shared) -> int | None:
    """The number of that GPU in this process; None if this process does not use it."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            if str(_properties(torch.device("cuda", number)).uuid) == shared.uuid:
                return number
    return None


def map_handle(handle: Sequence[Any], number: int, nbytes: int) -> torch.Tensor:
    """Another process's memory on GPU ``number`` as a flat uint8 tensor of this process.

    Raises RuntimeError if CUDA refuses to map it.
    """
    try:
        with _opening:
            storage: Any = torch.UntypedStorage._new_shared_cuda(number, *handle[1:])
    except RuntimeError:
        release_handle(handle)
        raise
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", number)).set_(storage)[:nbytes]


def release_handle(handle: Sequence[Any]) -> None:
    """Give up a handle that was not mapped: its maker need not keep the memory for it."""
    if handle:
        counters, offset = handle[4:6]
        storages: Any = torch.UntypedStorage
        storages._release_ipc_counter(counters, offset, device=handle[0])


def device_of(block: EncodedBlock) -> torch.device | None:
    """The GPU that the block's values lie on."""
    for _, chunk in block.places():
        if isinstance(chunk, CudaBytes):
            return chunk.device
    return None


class DeviceBlockView(BlockView):
    """A block in the memory of a GPU: tensors stay there until they are asked for, the rest is copied to the host."""

    __slots__ = ("_flat",)

    def __init__(self, flat: torch.Tensor) -> None:
        """``flat``: exactly the block. Blocks for a short copy of its head."""
        head = _to_host(flat[:_HEAD_BYTES])
        size = int.from_bytes(head[4:8].tobytes(), "little") + 8
        if size > head.nbytes:
            head = _to_host(flat[: min(size, MOST_HEAD_BYTES)])
        self._flat = flat[self._describe(head, flat.nbytes) :]
        self.memory = head

    def column(self, name: str) -> ColumnView:
        """One column, the values of a tensor as bytes on the GPU. Raises StorageKeyNotFoundError."""
        column = self._columns.get(name)
        if column is None:
            schema, ((low, size), *rest) = self._described_as(name)
            extents = None
            for offset, nbytes in rest:
                extents = _to_host(self._flat[offset : offset + nbytes]).view("<i8")
            values = self._flat[low : low + size]
            is_tensor = schema.kind in ("dense", "ragged") and size > 0
            column = self._made(schema, CudaBytes(values) if is_tensor else _to_host(values), extents)
            self._columns[name] = column
        return column


def _to_host(flat: torch.Tensor) -> Bytes:
    """A copy, made beside what the process computes on the GPU."""
    host = torch.empty(flat.nbytes, dtype=torch.uint8, device="cpu")
    with beside(flat.device):
        host.copy_(flat, non_blocking=True)
    array: Bytes = host.numpy()
    return array


def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)
