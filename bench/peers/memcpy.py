"""The limit of this machine: a put copies into warm memory, a get copies into new memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.data import Array, Batch, arrays
from bench.peers.base import Peer


class Memcpy(Peer):
    def __init__(self) -> None:
        self._warm: dict[str, Array] = {}

    def prepare(self, batch: Batch) -> dict[str, Array]:
        found = arrays(batch)
        self._warm = {name: np.ones_like(array) for name, array in found.items()}
        return found

    def put(self, prepared: dict[str, Array]) -> None:
        for name, array in prepared.items():
            np.copyto(self._warm[name], array)

    def get(self) -> dict[str, Array]:
        return {name: array.copy() for name, array in self._warm.items()}

    def column(self, got: dict[str, Array], name: str) -> Any:
        return got[name]


PEER = Memcpy
