"""Puts rows and reads all of them back, byte for byte, while the storage changes, until the row ``stop`` is there.

Prints "reading" once rows have come back, and at the end a line of JSON: rows put, rows read, and the longest round.
"""

from __future__ import annotations

import json
import time

import torch
from tensordict import TensorDict

import transfer_queue as tq

WIDTH = 16_384  # of int32: rows of 64 KB
NEW, KEPT = 4, 240
PAUSE_S = 0.05


def row(number: int) -> torch.Tensor:
    """What is put under the key ``number``."""
    return torch.arange(number, number + WIDTH, dtype=torch.int32)


def main() -> None:
    torch.set_num_threads(1)
    tq.init()
    put, read, longest, kept = 0, 0, 0.0, list[int]()
    while "stop" not in tq.kv_list("control").get("control", {}):
        began = time.monotonic()
        numbers = list(range(put, put + NEW))
        rows = TensorDict({"x": torch.stack([row(number) for number in numbers])}, batch_size=[NEW])
        tq.kv_batch_put(keys=[str(number) for number in numbers], partition_id="rows", fields=rows)
        put, kept = put + NEW, [*kept, *numbers]
        if len(kept) > KEPT:
            tq.kv_clear([str(number) for number in kept[:-KEPT]], "rows")
            kept = kept[-KEPT:]
        found = tq.kv_batch_get([str(number) for number in kept], "rows")["x"]
        for number, values in zip(kept, found, strict=True):
            if not torch.equal(values, row(number)):
                raise SystemExit(f"row {number}: other bytes than were put")
        if not read:
            print("reading", flush=True)
        read += len(kept)
        longest = max(longest, time.monotonic() - began)
        time.sleep(PAUSE_S)
    tq.close()
    print(json.dumps({"put": put, "read": read, "longest_s": round(longest, 2)}), flush=True)


if __name__ == "__main__":
    main()
