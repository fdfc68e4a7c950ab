"""Puts that stay on a GPU: a storage unit of the queue within this process, for what it puts itself."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from transfer_queue.client.io import close_in_forked_children
from transfer_queue.config.processes import StorageUnitConfig
from transfer_queue.config.quantity import Quantity
from transfer_queue.config.security import PeerSecurity, ServerSecurity
from transfer_queue.control.commands import BlockRef
from transfer_queue.errors import ConfigError, InvalidInputError
from transfer_queue.runtime.block_server import BlockServer
from transfer_queue.runtime.connection import Keepalive
from transfer_queue.runtime.storage_unit import ControllerLink
from transfer_queue.storage.base import StoreContext, UnitInfo

if TYPE_CHECKING:
    import torch

    from transfer_queue.columns.block import EncodedBlock
    from transfer_queue.storage.memory.device import DeviceStore

__all__ = ["MEMORY_VARIABLE", "DeviceUnits"]

log = logging.getLogger(__name__)

MEMORY_VARIABLE = "TQ_DEVICE_MEMORY"
"""Bytes of each GPU for blocks that stay there; taken at the first such put."""
_SHARE = 8
"""Part of the GPU's memory, without the variable."""


class DeviceUnits:
    """One unit for each GPU that puts of this process stayed on.

    They end with this process, and with them the rows that nobody has read: as with every storage unit that is lost,
    a get of such a row raises DataLostError.
    """

    def __init__(
        self, controller: list[str], security: PeerSecurity, run_copy: Callable[[Callable[[], Any]], Awaitable[Any]]
    ) -> None:
        self._controller = controller
        self._security = security
        self._run_copy = run_copy
        self._units: dict[torch.device, _Unit] = {}
        self._starting = asyncio.Lock()

    async def put(self, block: EncodedBlock, number: int, host: str, device: torch.device) -> tuple[BlockRef, UnitInfo]:
        """Store a block on the GPU of its tensors, else on ``device``. ``host``: where others reach this process.

        Raises CapacityError if there is no room now, StorageKeyNotFoundError if the block is dropped while it is
        written, InvalidInputError where the queue or the GPU does not allow it.
        """
        from transfer_queue.columns.device_memory import device_of

        device = device_of(block) or device
        async with self._starting:
            unit = self._units.get(device)
            if unit is None:
                unit = await self._start(device, host)
                self._units[device] = unit
        nbytes = await unit.store.put(block, number, self._run_copy)
        return BlockRef(unit.info.unit, number, 0, block.rows, nbytes), unit.info

    async def discard(self, number: int, unit: int) -> bool:
        """Drop a block of one of these units; False: it is not one of these."""
        for own in self._units.values():
            if own.info.unit == unit:
                await own.store.free([number])
                return True
        return False

    def doubt(self, refs: Sequence[BlockRef]) -> None:
        """Have the controller free blocks of these units that no row refers to."""
        for own in self._units.values():
            if blocks := [ref.block for ref in refs if ref.unit == own.info.unit]:
                own.doubt(blocks)

    async def close(self) -> None:
        units, self._units = self._units, {}
        for unit in units.values():
            if held := unit.store.stats().blocks:
                log.warning("rows on the GPU end with this client, which put them: those of %d puts are lost", held)
            await unit.close()

    async def _start(self, device: torch.device, host: str) -> _Unit:
        from transfer_queue.columns.device_memory import DeviceMemory
        from transfer_queue.storage.memory.device import DeviceStore

        if self._security.tls is not None or self._security.token_file is not None:
            raise InvalidInputError(
                "placement 'device': this queue admits peers by certificates or tokens, and a client has none to serve "
                "with; leave placement out"
            )
        memory = await self._run_copy(lambda: DeviceMemory(device, _budget(device)))
        name = f"device-{os.uname().nodename}-{os.getpid()}-{device.index}-{secrets.token_hex(2)}"
        store = DeviceStore(StoreContext(name, memory.nbytes, {}, "", log=log.warning), memory)
        unit = _Unit(store, name, self._controller, ServerSecurity(secret=self._security.secret))
        try:
            await unit.start(host)
        except BaseException:
            await unit.close()
            raise
        return unit


class _Unit:
    def __init__(self, store: DeviceStore, name: str, controller: list[str], security: ServerSecurity) -> None:
        config = StorageUnitConfig(name=name, controller=controller, security=security, capacity=store.stats().capacity)
        keepalive = Keepalive(config.timing.heartbeat, config.timing.peer_timeout)
        self.store = store
        self._security = security
        self._link = ControllerLink(config, store, keepalive, controller, None, lambda: True)
        self._server = BlockServer(store, keepalive, self._link.report_orphans)
        self._running: asyncio.Task[None] | None = None
        self._name = name
        close_in_forked_children(self)

    async def start(self, host: str) -> None:
        """Serve, and register with the controller. Raises StartError, ConnectionLostError."""
        await self._server.listen(host, 0, host, self._security)
        self._link.address = self._server.address
        registered = asyncio.Event()
        self._running = asyncio.create_task(self._link.run(registered))
        waiting = asyncio.create_task(registered.wait())
        await asyncio.wait([self._running, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._running.done():
            self._running.result()

    @property
    def info(self) -> UnitInfo:
        """As the controller knows it now: a unit that comes back late gets another number."""
        stats = self.store.stats()
        return UnitInfo(self.store.unit, self._name, self._server.address, stats.capacity, stats.used)

    def doubt(self, blocks: list[int]) -> None:
        self._link.report_orphans(blocks)

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
        await self._server.close()
        await self.store.close()

    def descriptors(self) -> list[int]:
        return [*self._server.descriptors(), *self._link.descriptors()]

    def abandon_in_child(self) -> None:
        self.store.abandon_in_child()


def _budget(device: torch.device) -> int:
    import torch

    text = os.environ.get(MEMORY_VARIABLE)
    if not text:
        return int(torch.cuda.get_device_properties(device).total_memory) // _SHARE
    try:
        return int(Quantity(text))
    except ValueError as error:
        raise ConfigError(f"environment variable {MEMORY_VARIABLE}: {error}") from None
