"""The process of one peer: ``python -m bench.serve NAME ATTACH``. Started by ``bench.protocol.PeerProcess``."""

from __future__ import annotations

import importlib
import json
import os
import sys

from bench.protocol import answer_all


def main() -> None:
    name, attach = sys.argv[1], json.loads(sys.argv[2])
    # Libraries print; the answers need a channel of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = importlib.import_module(f"bench.peers.{name}").PEER()
    peer.name = name
    peer.start(attach)
    try:
        answer_all(peer, sys.stdin, answers)
    finally:
        # Workers that a workload started end before the servers that they use.
        if workload := sys.modules.get("bench.workloads.ppo"):
            workload.stop_workers()
        peer.stop()


if __name__ == "__main__":
    main()
