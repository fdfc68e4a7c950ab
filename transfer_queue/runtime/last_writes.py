"""Which client wrote each field last: the answer to "who should write what this request waits for?"."""

from __future__ import annotations

from typing import NamedTuple

from transfer_queue.control.commands import Commit

__all__ = ["LastWrite", "LastWrites"]

_MOST_FIELDS = 4096
"""Fields that are remembered, those written last."""


class LastWrite(NamedTuple):
    """The newest put of a field. ``at``: seconds of ``time.monotonic``."""

    client: str
    partition: str
    at: float


class LastWrites:
    """The newest put of each field name, over all partitions."""

    def __init__(self) -> None:
        self._by_field: dict[str, LastWrite] = {}

    def note(self, client: str, command: Commit, at: float) -> None:
        """Remember a put that was accepted."""
        if not command.fields:
            return
        write = LastWrite(client, command.partition, at)
        for schema in command.fields:
            self._by_field.pop(schema.name, None)  # the newest is last
            self._by_field[schema.name] = write
        while len(self._by_field) > _MOST_FIELDS:
            del self._by_field[next(iter(self._by_field))]

    def of(self, field: str) -> LastWrite | None:
        """The newest put of ``field``; None: none is remembered."""
        return self._by_field.get(field)
