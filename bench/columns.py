"""How fast batches become blocks and blocks become batches, against memcpy of the same bytes.

Run ``python bench/columns.py``; it prints GB/s (10**9 bytes a second), the median and the best repetition.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from transfer_queue.columns.block import BlockView
from transfer_queue.columns.tensor_bytes import tensor_to_bytes
from transfer_queue.columns.tensors import Piece, decode, encode

ROWS = 1024


def dense_batch() -> TensorDict:
    """9 fields of 1024 x 8192 float32: 302 MB."""
    return TensorDict({f"f{i}": torch.randn(ROWS, 8192) for i in range(9)}, batch_size=[ROWS])


def mixed_batch() -> TensorDict:
    """4 dense, 4 ragged and 2 text fields, numbers and tags: about 252 MB."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2048, 8192, ROWS)
    offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))))
    fields: dict[str, Any] = {f"d{i}": torch.randn(ROWS, 8192) for i in range(4)}
    for i in range(4):
        values = torch.randint(0, 150_000, (int(offsets[-1]),))
        values = values if i < 2 else values.float()
        fields[f"r{i}"] = torch.nested.nested_tensor_from_jagged(values, offsets)
    for i in range(2):
        fields[f"t{i}"] = ["x" * int(n) for n in rng.integers(500, 2000, ROWS)]
    fields["label"] = [{"id": i, "source": "math"} if i % 2 else None for i in range(ROWS)]
    fields["reward"] = torch.randn(ROWS)
    return TensorDict(fields, batch_size=[ROWS])


def seconds(work: Callable[[], Any], repeat: int) -> tuple[float, float]:
    """The median and the shortest of the repetitions."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - start)
        del result
    return statistics.median(times), min(times)


def measure(name: str, batch: TensorDict, repeat: int) -> None:
    block = encode(batch)
    size = block.nbytes
    memory = np.ones(size, np.uint8)
    source = [
        tensor_to_bytes(value if not value.is_nested else value.values(), "")
        for value in batch.values()
        if isinstance(value, torch.Tensor)
    ]
    block.write_into(memory)
    view = BlockView(memory)
    whole = [Piece(view, None, None)]
    order = np.random.default_rng(1).permutation(ROWS)
    shuffled = [Piece(view, order, (0, ROWS))]
    names = [schema.name for schema in view.fields]

    def copy_to(out: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        position = 0
        for data in source:
            np.copyto(out[position : position + data.nbytes], data)
            position += data.nbytes
        return out

    def got(pieces: list[Piece], **options: Any) -> Callable[[], TensorDict]:
        return lambda: decode(dict.fromkeys(names, pieces), ROWS, view.fields, **options)

    def written_and_read() -> TensorDict:
        encode(batch).write_into(memory)
        return got(whole)()

    works: dict[str, Callable[[], Any]] = {
        "memcpy, warm": lambda: copy_to(memory),
        "memcpy, fresh memory": lambda: copy_to(np.empty(size, np.uint8)),
        "encode": lambda: encode(batch),
        "encode + write": lambda: encode(batch).write_into(memory),
        "decode, copy": got(whole),
        "decode, shuffled rows": got(shuffled),
        "decode, view": got(whole, copy=False),
        "encode + write + decode": written_and_read,
    }
    results = {}
    for label, work in works.items():
        results[label] = seconds(work, repeat)
        block.write_into(memory)
    for label, (taken, best) in results.items():
        share = results["memcpy, warm"][1] / best
        print(
            f"{name:14} {label:26} {taken * 1e3:9.2f} ms {size / taken / 1e9:9.2f} GB/s  best {best * 1e3:9.2f} ms "
            f"{size / best / 1e9:9.2f} GB/s {share:7.2f} of memcpy"
        )


def measure_small(repeat: int) -> None:
    """1 KB puts, and a batch gathered from one-row blocks."""
    batch = TensorDict({"a": torch.randn(1, 128), "b": torch.zeros(1), "s": ["text" * 100]}, batch_size=[1])
    memory = bytearray(encode(batch).nbytes)
    blocks = [encode(batch).to_bytes() for _ in range(ROWS)]
    fields = BlockView(blocks[0]).fields

    def gather() -> TensorDict:
        pieces = [Piece(BlockView(block), None, (i, i + 1)) for i, block in enumerate(blocks)]
        return decode({schema.name: pieces for schema in fields}, ROWS, fields)

    def read() -> TensorDict:
        pieces = [Piece(BlockView(memory), None, None)]
        return decode({schema.name: pieces for schema in fields}, 1, fields)

    for label, work in {
        "1 KB: encode + write": lambda: encode(batch).write_into(memory),
        "1 KB: view + decode": read,
        f"{ROWS} one-row blocks: decode": gather,
    }.items():
        work()
        taken, best = seconds(work, repeat * 10)
        print(f"{'small':14} {label:32} {taken * 1e3:9.3f} ms  best {best * 1e3:9.3f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    measure("dense 302 MB", dense_batch(), options.repeat)
    measure("mixed 252 MB", mixed_batch(), options.repeat)
    measure_small(options.repeat)
