"""Saves checkpoints again and again until it is killed: ``python checkpoint_saver.py ADDRESS DIRECTORY``.

A block of CHANGING_BYTES is put before each, so that there is something to write.
"""

from __future__ import annotations

import itertools
import sys

import torch

import transfer_queue as tq

CHANGING_BYTES = 4 << 20


def change(count: int) -> None:
    tq.kv_put("k", "changing", {"x": torch.full((CHANGING_BYTES // 8,), count)})


if __name__ == "__main__":
    address, directory = sys.argv[1:]
    tq.init({"controller": {"addresses": [address]}})
    for count in itertools.count():
        change(count)
        tq.save_checkpoint(directory, metadata={"count": count})
        print(count, flush=True)
