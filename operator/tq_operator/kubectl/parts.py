"""The parts of a queue that have pods."""

from __future__ import annotations

from enum import Enum

__all__ = ["Part"]


class Part(str, Enum):
    """Parts of a queue that have pods, in the order in which they are shown."""

    controller = "controller"
    storage = "storage"
    mooncake_master = "mooncake-master"
    mooncake_masters = "mooncake-masters"
    etcd = "etcd"
    checkpoint = "checkpoint"
