"""Saves checkpoints again and again until it is killed: ``python checkpoint_saver.py ADDRESS DIRECTORY``."""

from __future__ import annotations

import itertools
import sys

import transfer_queue as tq

if __name__ == "__main__":
    address, directory = sys.argv[1:]
    tq.init({"controller": {"addresses": [address]}})
    for count in itertools.count():
        tq.save_checkpoint(directory, metadata={"count": count})
        print(count, flush=True)
