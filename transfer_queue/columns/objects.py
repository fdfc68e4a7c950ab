"""Any number of objects in as many caller-owned buffers, and back: the packed-buffer path of key-value backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from transfer_queue.columns.column import as_bytes
from transfer_queue.columns.documents import decode_frames, encode_frames
from transfer_queue.columns.packing import Buffer, Target, calc_packed_size, pack_into, unpack_from
from transfer_queue.errors import InvalidInputError

__all__ = ["batch_decode_from", "batch_encode_into"]

PARALLEL_BYTES: Final = 16 << 20


def batch_encode_into(
    objs: Sequence[Any],
    alloc_buff_func: Callable[[list[int]], Sequence[Target]],
    num_workers: int = 1,
    *,
    allow_pickle: bool = True,
) -> tuple[list[Target], list[int]]:
    """Encode each object into a buffer of its own; ``batch_decode_from`` of the buffers gives the objects back.

    ``alloc_buff_func`` is called once, with the bytes each object needs, and returns one writable buffer for each, of
    at least this size, anywhere in memory, for example slices of one registered buffer or uint8 tensors on the CPU. The
    caller owns the buffers and keeps them alive while they are used. Tensors and arrays are copied once, directly into
    their buffer.

    ``num_workers``: threads that copy. Only the copying of large buffers releases the GIL, so more than one is used
    from 16 MiB in total on; below that, starting threads costs more than they gain. Safe to call from many threads.

    Returns the buffers and the bytes used in each. Raises InvalidInputError for buffers that are too few, too small
    or read-only, InvalidTypeError for an object that cannot be stored.
    """
    if num_workers < 1:
        raise InvalidInputError(f"num_workers must be at least 1, not {num_workers}")
    encoded = [
        encode_frames(obj, allow_pickle=allow_pickle, where=f"object {number}") for number, obj in enumerate(objs)
    ]
    sizes = [calc_packed_size(frames) for frames in encoded]
    buffers = list(alloc_buff_func(sizes))
    if len(buffers) != len(encoded):
        raise InvalidInputError(f"alloc_buff_func gave {len(buffers)} buffers for {len(encoded)} objects")
    if num_workers == 1 or sum(sizes) < PARALLEL_BYTES:
        for buffer, frames in zip(buffers, encoded, strict=True):
            pack_into(_memory(buffer), frames)
    else:
        with ThreadPoolExecutor(num_workers, thread_name_prefix="tq-pack") as pool:
            # Consuming the results raises what a worker raised.
            list(pool.map(pack_into, map(_memory, buffers), encoded))
    return buffers, sizes


def batch_decode_from(source_buffers: Sequence[Buffer], *, allow_pickle: bool = True) -> list[Any]:
    """Decode the objects in ``source_buffers``, which may be uint8 tensors on the CPU. The objects own their memory.

    A buffer may be longer than its content.

    Raises CorruptBlockError for damaged buffers, InvalidTypeError for pickled objects without ``allow_pickle``.
    """
    return [
        decode_frames([as_bytes(frame) for frame in unpack_from(_memory(buffer))], allow_pickle=allow_pickle)
        for buffer in source_buffers
    ]


def _memory(buffer: Any) -> Any:
    """The memory of a tensor on the CPU; other buffers unchanged."""
    return buffer.numpy() if hasattr(buffer, "numpy") else buffer
