"""This checkout's TransferQueue on Mooncake over TCP: two units with a segment of 1 GiB each, on this machine."""

from __future__ import annotations

from bench.peers.mooncake_master import free_ports
from bench.peers.ours import UNITS, Ours
from transfer_queue.config import resource
from transfer_queue.launch.local import LocalStack
from transfer_queue.launch.plan import LocalPlan, plan_local


class OursMooncake(Ours):
    def plan(self) -> LocalPlan:
        ports = free_ports(5 + 2 * UNITS)
        master = dict(zip(("rpcPort", "httpMetadataPort", "metricsPort"), ports, strict=False))
        mooncake = {"protocol": "tcp", "globalSegmentSize": "1Gi", "master": master}
        # Unit i listens i ports above the first: see plan_local.
        document = {
            "apiVersion": "transferqueue.io/v1alpha1",
            "kind": "TransferQueue",
            "metadata": {"name": "bench"},
            "spec": {
                "backend": {"mooncake": mooncake},
                "controller": {"port": ports[3], "metricsPort": ports[4]},
                "storage": {"replicas": UNITS, "port": ports[5], "metricsPort": ports[5 + UNITS]},
            },
        }
        return plan_local(resource.parse(document))

    def settle(self, stack: LocalStack) -> None:
        """A segment is mounted when its unit is ready."""


PEER = OursMooncake
