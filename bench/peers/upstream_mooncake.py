"""The PyPI release of TransferQueue on MooncakeStore over TCP; its master is started here, as it would end others'."""

from __future__ import annotations

from typing import Any

import transfer_queue as tq
from bench.peers.mooncake_master import Master
from bench.peers.upstream import Upstream

SEGMENT = 1 << 30
BUFFER = 512 << 20


class UpstreamMooncake(Upstream):
    def __init__(self) -> None:
        super().__init__()
        self._master: Master | None = None

    def join(self, attach: dict[str, Any] | None) -> None:
        if attach is not None:
            tq.init()  # finds the controller and its settings through Ray
            return
        from omegaconf import OmegaConf

        self._master = Master()
        store = {
            "auto_init": False,
            "metadata_server": self._master.metadata,
            "master_server_address": self._master.address,
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "global_segment_size": SEGMENT,
            "local_buffer_size": BUFFER,
        }
        tq.init(OmegaConf.create({"backend": {"storage_backend": "MooncakeStore", "MooncakeStore": store}}))

    def stop(self) -> None:
        super().stop()
        if self._master is not None:
            self._master.stop()


PEER = UpstreamMooncake
