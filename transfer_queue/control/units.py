"""Storage units: which are lost, and what becomes of their rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from transfer_queue.control.arrays import Ints
from transfer_queue.control.blocks import BlockTable
from transfer_queue.control.partition import Partition
from transfer_queue.control.subscription import Subscription

__all__ = ["Units"]


class Units:
    """``lost``: units that were reported lost and did not join since."""

    def __init__(self, blocks: BlockTable, partitions: dict[str, Partition]) -> None:
        self.lost: set[int] = set()
        self._blocks = blocks
        self._partitions = partitions

    def lose(self, unit: int) -> None:
        """All cells on the unit are lost until it returns with their blocks, or they are written again."""
        self.lost.add(unit)
        self._mark_lost(self.suspect(unit))

    def suspect(self, unit: int) -> Ints:
        """The unit is to be asked for all of its blocks, whose slots are returned."""
        slots = self._blocks.slots_of_unit(unit)
        self._blocks.suspect.array[slots] = 1
        return slots

    def sort_out(self, unit: int, inventory: Iterable[int]) -> tuple[list[int], list[int]]:
        """Suspect blocks of a unit that are in its inventory, and those that are not."""
        slots = self._blocks.slots_of_unit(unit)
        blocks = self._blocks.block.array[slots[self._blocks.suspect.array[slots] == 1]]
        there = np.isin(blocks, np.array(list(inventory), np.uint64))
        return blocks[there].tolist(), blocks[~there].tolist()

    def join(self, unit: int, restored: list[int], lost: list[int]) -> list[tuple[Partition, list[Subscription]]]:
        """The unit is back with some of its blocks. Returns the subscriptions that may have grown."""
        self.lost.discard(unit)
        found = self._blocks.find(unit, restored)
        self._blocks.suspect.array[found] = 0
        self._mark_lost(self._blocks.find(unit, lost))
        mask = self._blocks.mask(found)
        return [(partition, partition.restore(mask)) for partition in self._partitions.values()] if len(found) else []

    def move(self, unit: int, blocks: list[int], units: list[int], copies: list[int]) -> list[int]:
        """Rows in ``blocks`` of ``unit`` lie in ``copies`` on ``units`` from now on. Returns the blocks that were known
        there, which are free now."""
        copy_of = {block: copy for block, *copy in zip(blocks, units, copies, strict=True)}
        table = self._blocks
        moved = []
        for slot in table.find(unit, blocks).tolist():
            block = table.block.items[slot]
            table.unit.items[slot], table.block.items[slot] = copy_of[block]
            table.suspect.items[slot] = 0
            moved.append(block)
        return moved

    def _mark_lost(self, slots: Ints) -> None:
        if len(slots):
            mask = self._blocks.mask(slots)
            for partition in self._partitions.values():
                partition.lose(mask)
