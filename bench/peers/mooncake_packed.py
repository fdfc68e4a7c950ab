"""Mooncake itself for a batch that lies in arrays of its user: a put first copies them into the registered buffer."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.data import Array, Batch
from bench.peers.mooncake_raw import MooncakeRaw


class MooncakePacked(MooncakeRaw):
    def prepare(self, batch: Batch) -> list[tuple[int, Array]]:
        """Offset in the registered buffer and bytes of each column."""
        super().prepare(batch)
        return [(offset, array.reshape(-1).view(np.uint8)) for offset, array in self._layout.values()]

    def put(self, prepared: Any) -> None:
        for offset, column in prepared:
            np.copyto(self._source[offset : offset + column.nbytes], column)
        super().put(self._source)


PEER = MooncakePacked
