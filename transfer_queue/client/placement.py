"""Choosing the storage unit for a block."""

from __future__ import annotations

from collections.abc import Sequence

from transfer_queue.columns.block import EncodedBlock
from transfer_queue.errors import CapacityError
from transfer_queue.storage.base import DEVICE, UnitInfo

__all__ = ["Placement"]

_RUN_BYTES = 256 << 10
"""Small blocks go to one unit until they make up this much: the unit stays awake, and a batch of them is one read."""


class Placement:
    """Round robin over the units that take new blocks, starting somewhere else in every client.

    Blocks of ``_RUN_BYTES`` or more move on by one unit each, smaller ones once they make up as much together.
    """

    def __init__(self, seed: int) -> None:
        self._units: dict[int, UnitInfo] = {}
        self._writable: list[UnitInfo] = []
        self._turn = seed
        self._run_bytes = 0

    def update(self, units: Sequence[UnitInfo]) -> None:
        self._units = {info.unit: info for info in units}
        # What lies on a GPU is put there by that GPU's process alone.
        self._writable = [info for info in units if not info.draining and DEVICE not in info.attributes]

    def get(self, unit: int) -> UnitInfo | None:
        """A unit by number, also one that takes no new blocks."""
        return self._units.get(unit)

    @property
    def writable_units(self) -> int:
        """Number of units that accept new blocks."""
        return len(self._writable)

    def candidates(self, nbytes: int) -> list[UnitInfo]:
        """Units that could ever hold a block of ``nbytes``, in the order to try."""
        fitting = [info for info in self._writable if info.capacity >= nbytes]
        if not fitting:
            return []
        self._run_bytes += nbytes
        if self._run_bytes >= _RUN_BYTES:
            self.move_on()
        start = self._turn % len(fitting)
        return fitting[start:] + fitting[:start]

    def move_on(self) -> None:
        """Try another unit first from now on."""
        self._turn += 1
        self._run_bytes = 0

    def check_rows(self, block: EncodedBlock) -> None:
        """Raises CapacityError for a row that exceeds the capacity of every unit."""
        most = max((info.capacity for info in self._units.values() if DEVICE not in info.attributes), default=0)
        if not most or block.nbytes <= most:
            return
        if block.rows == 1:
            raise CapacityError(
                f"a row of {block.nbytes} bytes exceeds the capacity of every storage unit, at most {most} bytes; put "
                "smaller rows, or give the units more memory"
            )
        middle = block.rows // 2
        for rows in ((0, middle), (middle, block.rows)):
            self.check_rows(block.select(None, rows))

    def parts(self, nbytes: int, max_block_bytes: int | None) -> int:
        """Return the number of blocks into which a put of ``nbytes`` is split: one if it fits.

        Raises CapacityError if all units together could not hold it.
        """
        capacities = [info.capacity for info in self._writable]
        if not capacities:
            raise CapacityError("there is no storage capacity: no storage unit is registered with the controller")
        if nbytes > sum(capacities):
            raise CapacityError(
                f"a put of {nbytes} bytes exceeds the capacity of all storage units together, {sum(capacities)} bytes; "
                "put smaller batches or add storage"
            )
        limit = min(max(capacities), max_block_bytes or max(capacities))
        # Half: an arena that holds anything else has no single extent of its full size.
        return 1 if nbytes <= limit // 2 else -(-nbytes // max(1, limit // 4))
