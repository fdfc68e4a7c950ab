"""This checkout's TransferQueue as a client on another host sees it: over TCP, on loopback here."""

from __future__ import annotations

from bench.peers.ours import Ours
from transfer_queue.launch.plan import LocalPlan


class OursTcp(Ours):
    def plan(self) -> LocalPlan:
        return super().plan().with_backend_settings({"sharedMemory": False})


PEER = OursTcp
