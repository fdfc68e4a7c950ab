"""``TQNode``: the RDMA fabric of a node. Written by a pod on that node; there is nothing to wish for."""

from __future__ import annotations

from pydantic import Field

from tq_operator.api.status import Condition, Reported

__all__ = ["NODE_KIND", "NODE_PLURAL", "NodeStatus"]

NODE_KIND = "TQNode"
NODE_PLURAL = "tqnodes"


class Hca(Reported):
    """One RDMA device, as its best port shows it."""

    name: str = Field(description="Name under /sys/class/infiniband.")
    address: str = Field(description="PCI address.")
    numa_node: int | None = Field(default=None, description="NUMA node; absent if the machine does not say.")
    link_layer: str = Field(description="InfiniBand or Ethernet (RoCE).")
    state: str = Field(description="State of the port, such as ACTIVE or DOWN.")
    rate: str = Field(description="Gb/s.")
    gid: str = Field(description="The GID that peers would use.")
    netdevs: list[str] = Field(default=[], description="Network interfaces of the same device.")
    usable: bool = Field(description="Whether data may move through it.")
    reason: str = Field(description="Why it is not usable.")


class Gpu(Reported):
    """One GPU, and the HCAs for its data."""

    name: str = Field(description="Name, such as gpu0.")
    address: str = Field(description="PCI address.")
    numa_node: int | None = Field(default=None, description="NUMA node; absent if the machine does not say.")
    hcas: list[str] = Field(default=[], description="The HCAs that a process on this GPU uses.")
    reason: str = Field(description="Why these.")
    distances: dict[str, str] = Field(
        default={}, description="To each HCA: PIX, PXB, PHB, NODE or SYS, the nearest first; or unknown."
    )


class NodeStatus(Reported):
    """The fabric as last read."""

    summary: str = Field(default="", description="How many of the HCAs are usable, in words.")
    usable: str = Field(default="", description="usable/all HCAs.")
    links: str = Field(default="", description="Link layers of the usable HCAs.")
    rates: str = Field(default="", description="Rates of the usable HCAs in Gb/s.")
    unusable: str = Field(default="", description="The other HCAs, and why.")
    gpu_count: int = Field(default=0, description="GPUs.")
    distance_source: str = Field(default="", description="Where the distances come from.")
    hcas: list[Hca] = Field(default=[], description="All RDMA devices.")
    gpus: list[Gpu] = Field(default=[], description="All GPUs.")
    conditions: list[Condition] = Field(default=[], description="RdmaAvailable.")
