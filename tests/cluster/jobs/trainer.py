"""Trainer Job of the end-to-end test: takes whole groups and compares every byte with the digest in the episode's tag.

Prints "first batch" when it has one, and at the end a line of JSON: episodes, bytes, and from which hosts they came.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch

import transfer_queue as tq

FIELDS = ["observations", "actions", "logprobs", "rewards", "ending"]
BATCH = 8


def main() -> None:
    expected = int(sys.argv[1])
    torch.set_num_threads(1)
    tq.init()
    client = tq.get_client()
    seen, nbytes, hosts = 0, 0, set()
    while seen < expected:
        try:
            meta = client.get_meta(FIELDS, BATCH, "rollouts", mode="fetch", task_name="train")
        except TimeoutError:
            continue  # the rollout pods may still be starting; the Job's deadline bounds this
        if not seen:
            print("first batch", flush=True)
        batch = client.get_data(meta)
        columns = {name: list(batch[name]) for name in FIELDS}
        for row, tag in enumerate(meta.custom_meta):
            found, size = digest({name: column[row] for name, column in columns.items()})
            if found != tag["sha256"]:
                sys.exit(f"row {meta.global_indexes[row]}: bytes differ from those that were put")
            hosts.add(tag["host"])
            nbytes += size
        seen += meta.size
        client.clear_samples(meta)
    tq.close()
    print(json.dumps({"episodes": seen, "bytes": nbytes, "hosts": sorted(hosts)}), flush=True)


def digest(episode: dict[str, Any]) -> tuple[str, int]:
    """SHA-256 as the rollout Job computes it, and the number of bytes under it."""
    total, size = hashlib.sha256(), 0
    for name in FIELDS[:-1]:
        content = episode[name].contiguous().numpy().tobytes()
        total.update(content)
        size += len(content)
    ending = str(episode["ending"]).encode()
    total.update(ending)
    return total.hexdigest(), size + len(ending)


if __name__ == "__main__":
    main()
