"""A controller and a storage unit with given ``security``, and clients of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration.queue_command import free_ports
from tests.integration.stack import TIMING, Process
from transfer_queue.client import TransferQueueClient
from transfer_queue.config.attach import AttachConfig
from transfer_queue.config.document import validate_document
from transfer_queue.config.processes import Durability


class Servers:
    """``controllers`` and ``unit`` are processes."""

    def __init__(
        self,
        folder: Path,
        controller: dict[str, Any],
        unit: dict[str, Any],
        shards: int = 1,
        durability: Durability = "none",
    ) -> None:
        local = {"host": "127.0.0.1", "port": 0, "metricsPort": 0, "timing": TIMING}
        first = free_ports(shards)
        addresses = [f"127.0.0.1:{first + shard}" for shard in range(shards)] if shards > 1 else []
        self.controllers = []
        for shard in range(shards):
            own: dict[str, Any] = {"port": first + shard, "shard": shard, "shards": addresses} if addresses else {}
            if durability != "none":
                own |= {"durability": durability, "journal": str(folder / f"journal-{shard}")}
            process = Process(
                "transfer_queue.runtime.controller",
                {**local, **own, "security": controller},
                folder,
                f"controller-{shard}",
            )
            self.controllers.append(process.wait_ready())
        self.controller = self.controllers[0]
        settings = {
            "controller": [self.address],
            "capacity": "32Mi",
            "directory": str(folder),
            "prefault": False,
            "shards": addresses,
        }
        self.unit = Process(
            "transfer_queue.runtime.storage_unit", {**local, **settings, "security": unit}, folder, "unit"
        )

    @property
    def address(self) -> str:
        return str(self.controller.ready["address"])

    def config(self, **security: Any) -> AttachConfig:
        return validate_document(
            AttachConfig, {"layout": "dense", "controller": {"addresses": [self.address]}, "security": security}, "test"
        )

    @contextmanager
    def client(self, **security: Any) -> Iterator[TransferQueueClient]:
        client = TransferQueueClient("client", self.config(**security))
        try:
            yield client
        finally:
            client.close()

    def stop(self) -> None:
        self.unit.stop()
        for controller in self.controllers:
            controller.stop()


@contextmanager
def running(
    folder: Path,
    controller: dict[str, Any],
    unit: dict[str, Any] | None = None,
    shards: int = 1,
    durability: Durability = "none",
) -> Iterator[Servers]:
    servers = Servers(folder, controller, controller if unit is None else unit, shards, durability)
    try:
        servers.unit.wait_ready()
        yield servers
    finally:
        servers.stop()
