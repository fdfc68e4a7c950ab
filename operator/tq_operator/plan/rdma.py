"""Does the queue move its bytes over RDMA or TCP, and how to say so. Pure: the capacity is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transfer_queue.config.resource import Rdma, Spec

__all__ = ["Transport", "choose_transport"]

Protocol = Literal["tcp", "rdma"]


@dataclass(frozen=True)
class Transport:
    """``available``: status of the condition RdmaAvailable, None where the queue never asked for RDMA."""

    protocol: Protocol
    available: Literal["True", "False", "Unknown"] | None = None
    reason: str = ""
    message: str = ""


@dataclass(frozen=True)
class _Words:
    """What is said of the devices that a queue asks for."""

    unknown: tuple[str, str]
    """Reason and message where they cannot be seen."""
    offered: str
    nothing: str
    late: str
    """They were not there at first."""


def choose_transport(
    spec: Spec, capacity: int | None, running: str | None, working: bool, missing: str = ""
) -> Transport:
    """``capacity``: devices on all nodes together, None if they cannot be seen. Of ``rdma.resourceName``; with
    ``rdma.claim`` all that ResourceSlices list, if there is the DeviceClass: which of them it selects is for the
    scheduler.

    ``running``: what this generation of the spec runs with so far; with policy ``auto`` it stays, so that a node that
    comes or goes restarts nothing. Only RDMA that is not ``working`` gives way to TCP. ``missing``: why there are no
    devices, where more is known than their number.
    """
    policy, words = spec.rdma.policy, _words(spec.rdma)
    if spec.transport == "tcp":
        return Transport("tcp")
    if words is None:  # the schema refuses this with policy required
        return Transport(
            "tcp",
            "False",
            "NoResourceName",
            "Bytes move over TCP: without rdma.resourceName or rdma.claim no pod gets an RDMA device. Set one to the "
            "extended resource of the RDMA device plugin (kubectl describe node lists them) or to the DeviceClass of a "
            'DRA driver, or rdma.policy to "off".',
        )
    if capacity is None:
        reason, message = words.unknown
        if policy == "auto" and running == "tcp":
            return Transport("tcp", "Unknown", reason, f"Bytes move over TCP as before. {message}")
        return Transport("rdma", "Unknown", reason, message)
    nothing = missing or words.nothing
    if policy == "required":
        if capacity:
            return Transport("rdma", "True", "DevicesOffered", words.offered)
        return Transport("rdma", "False", "RdmaUnavailable", f"Pods wait for RDMA: {nothing}.")
    if capacity and running == "tcp":
        return Transport(
            "tcp",
            "False",
            "FellBackToTcp",
            f"Bytes move over TCP: {words.late}; the next change of the spec takes up RDMA.",
        )
    if capacity:
        return Transport("rdma", "True", "DevicesOffered", words.offered)
    if running == "rdma" and working:
        return Transport(
            "rdma", "False", "CapacityGone", f"Running pods keep their devices, new ones get none: {nothing}."
        )
    return Transport("tcp", "False", "FellBackToTcp", f"Bytes move over TCP: {nothing}.")


def _words(rdma: Rdma) -> _Words | None:
    """None if the queue names no devices."""
    if rdma.claim is not None:
        name = f"DeviceClass {rdma.claim.device_class_name}"
        return _Words(
            (
                "DevicesUnknown",
                f"The operator may not read DeviceClasses and ResourceSlices, so it cannot tell whether {name} has any "
                "device.",
            ),
            f"{name} exists and nodes list devices; which of them it selects is for the scheduler.",
            f"there is no {name} or no device; check that the DRA driver runs and that the name is right",
            f"there was no device for {name} when this spec was taken up. Nodes list devices now",
        )
    if rdma.resource_name is not None:
        name = rdma.resource_name
        return _Words(
            ("NodesUnknown", f"The operator may not read nodes, so it cannot tell whether any offers {name}."),
            f"Nodes offer {name}.",
            f"no node offers {name}; check that the RDMA device plugin runs and that the name is right",
            f"no node offered {name} when this spec was taken up. Nodes offer it now",
        )
    return None
