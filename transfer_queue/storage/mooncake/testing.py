"""Servers for the conformance suite: a Mooncake master on free ports of the loopback interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transfer_queue.storage.mooncake.master import MasterProcess
from transfer_queue.storage.mooncake.settings import MasterSettings

__all__ = ["servers"]


@contextmanager
def servers(directory: Path) -> Iterator[dict[str, Any]]:
    """A ``mooncake_master``; gives the settings of clients and units, over TCP and with small buffers."""
    master = MasterProcess(
        MasterSettings(rpc_port=0, http_metadata_port=0, metrics_port=0), directory / "mooncake_master.log"
    )
    try:
        yield {
            **master.start().settings(),
            "protocol": "tcp",
            "zeroCopy": {"tensorBufferSize": "64Mi", "bytesBufferSize": "64Mi"},
        }
    finally:
        master.stop()
