"""The batches of the workloads as numpy columns; each peer turns them into its native form outside of the timing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
ROWS = 1024
TEXT_BYTES = 32 << 10


@dataclass(frozen=True)
class Ragged:
    """``values`` of all rows in a row; row i is ``values[offsets[i]:offsets[i + 1]]``."""

    values: Array
    offsets: NDArray[np.int64]


Column: TypeAlias = "Array | Ragged | list[str]"
Batch: TypeAlias = "dict[str, Column]"


def nbytes(batch: Batch) -> int:
    """Bytes of values; of strings their UTF-8, which here is their length."""
    total = 0
    for column in batch.values():
        if isinstance(column, list):
            total += sum(map(len, column))
        else:
            total += (column.values if isinstance(column, Ragged) else column).nbytes
    return total


def arrays(batch: Batch) -> dict[str, Array]:
    """The bytes of each column as one array: of ragged ones the values, of strings their UTF-8."""
    return {
        name: np.frombuffer("".join(column).encode(), np.uint8)
        if isinstance(column, list)
        else column.values
        if isinstance(column, Ragged)
        else column
        for name, column in batch.items()
    }


@cache
def dense(columns: int = 9) -> Batch:
    """``columns`` fields of 1024 x 8192 float32; 9 make 302 MB."""
    rng = np.random.default_rng(0)
    return {f"f{i}": rng.random((ROWS, 8192), np.float32) for i in range(columns)}


@cache
def mixed(columns: int = 4) -> Batch:
    """Dense and ragged fields, as many of each, two of text, rewards; 4 make about 252 MB."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(2048, 8192, ROWS)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    total = int(offsets[-1])
    batch: Batch = {f"d{i}": rng.random((ROWS, 8192), np.float32) for i in range(columns)}
    for i in range(columns):
        values = rng.integers(0, 150_000, total) if i % 2 else rng.random(total, np.float32)
        batch[f"r{i}"] = Ragged(values, offsets)
    for i in range(2):
        batch[f"t{i}"] = ["x" * int(length) for length in rng.integers(500, 2000, ROWS)]
    batch["reward"] = rng.random(ROWS, np.float32)
    return batch


@cache
def complex_(columns: int = 3) -> Batch:
    """Dense and ragged fields and fields of 32 KB of text, as many of each; 3 make about 252 MB."""
    rng = np.random.default_rng(2)
    offsets = np.concatenate(([0], np.cumsum(rng.integers(2048, 6144, ROWS))))
    letters = rng.integers(97, 123, 2 * TEXT_BYTES, np.uint8).tobytes().decode()
    batch: Batch = {f"d{i}": rng.random((ROWS, 8192), np.float32) for i in range(columns)}
    for i in range(columns):
        batch[f"r{i}"] = Ragged(rng.random(int(offsets[-1]), np.float32), offsets)
    for i in range(columns):
        batch[f"t{i}"] = [letters[start : start + TEXT_BYTES] for start in rng.integers(0, TEXT_BYTES, ROWS)]
    return batch
