"""The RDMA fabric of a node as the operator reports it; the fabric itself is read by :mod:`transfer_queue.fabric`."""

from tq_operator.fabric.node import node_status, rdma_condition

__all__ = ["node_status", "rdma_condition"]
