"""As ``ours_tcp``, with TLS: certificates on both sides, made as ``tq up`` makes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.peers.ours_tcp import OursTcp
from transfer_queue.launch.local import LocalStack
from transfer_queue.launch.plan import LocalPlan


class OursTls(OursTcp):
    def plan(self) -> LocalPlan:
        return replace(super().plan(), tls=True)

    def attach(self, stack: LocalStack) -> dict[str, Any]:
        return {**super().attach(stack), "security": stack.attach_config.dump()["security"]}


PEER = OursTls
