"""Does the queue move its bytes over RDMA or TCP, and how to say so. Pure: the capacity is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transfer_queue.config.resource import Spec

__all__ = ["Transport", "choose_transport"]

Protocol = Literal["tcp", "rdma"]


@dataclass(frozen=True)
class Transport:
    """``available``: status of the condition RdmaAvailable, None where the queue never asked for RDMA."""

    protocol: Protocol
    available: Literal["True", "False", "Unknown"] | None = None
    reason: str = ""
    message: str = ""


def choose_transport(spec: Spec, capacity: int | None, running: str | None, working: bool) -> Transport:
    """``capacity``: devices of ``rdma.resourceName`` on all nodes together, None if that cannot be seen.

    ``running``: what this generation of the spec runs with so far; with policy ``auto`` it stays, so that a node that
    comes or goes restarts nothing. Only RDMA that is not ``working`` gives way to TCP.
    """
    name, policy = spec.rdma.resource_name, spec.rdma.policy
    if spec.transport == "tcp":
        return Transport("tcp")
    if name is None:  # the schema refuses this with policy required
        return Transport(
            "tcp",
            "False",
            "NoResourceName",
            "Bytes move over TCP: without rdma.resourceName no pod gets an RDMA device. Set it to the extended "
            'resource of the RDMA device plugin (kubectl describe node lists them), or rdma.policy to "off".',
        )
    if capacity is None:
        message = f"The operator may not read nodes, so it cannot tell whether any offers {name}."
        return Transport("rdma", "Unknown", "NodesUnknown", message)
    nothing = f"no node offers {name}; check that the RDMA device plugin runs and that the name is right"
    if policy == "required":
        if capacity:
            return Transport("rdma", "True", "DevicesOffered", f"Nodes offer {name}.")
        return Transport("rdma", "False", "RdmaUnavailable", f"Pods wait for RDMA: {nothing}.")
    if capacity and running == "tcp":
        return Transport(
            "tcp",
            "False",
            "FellBackToTcp",
            f"Bytes move over TCP: no node offered {name} when this spec was taken up. Nodes offer it now; "
            "the next change of the spec takes up RDMA.",
        )
    if capacity:
        return Transport("rdma", "True", "DevicesOffered", f"Nodes offer {name}.")
    if running == "rdma" and working:
        return Transport(
            "rdma", "False", "CapacityGone", f"Running pods keep their devices, new ones get none: {nothing}."
        )
    return Transport("tcp", "False", "FellBackToTcp", f"Bytes move over TCP: {nothing}.")
