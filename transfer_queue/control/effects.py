"""What the core asks its host to do, as data."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from transfer_queue.control.commands import Reply
from transfer_queue.control.records import Record
from transfer_queue.errors import TransferQueueError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["PARKED", "Answer", "Effect", "EffectLog", "FreeBlocks", "Journal", "Parked"]


class Parked(msgspec.Struct, frozen=True):
    """Instead of a reply: the request waits, an `Answer` effect with its client and request number follows."""


PARKED = Parked()


class Answer(msgspec.Struct, frozen=True):
    """The end of a parked request: exactly one of ``reply`` and ``error`` is set."""

    client: int
    request: int
    reply: Reply | None = None
    error: TransferQueueError | None = None


class FreeBlocks(msgspec.Struct, frozen=True):
    """No row refers to these blocks of ``unit`` any more."""

    unit: int
    blocks: list[int]


class Journal(msgspec.Struct, frozen=True):
    """Append ``record`` to the journal. ``client`` and ``request`` name the request that caused it (0, 0: none).

    Journal effects come first in a drain: make them durable before acting on the others.
    """

    record: Record
    client: int = 0
    request: int = 0


Effect: TypeAlias = Answer | FreeBlocks | Journal


class EffectLog:
    """Collects effects until the host drains them."""

    __slots__ = ("_answers", "_frees", "_records", "journaling", "origin")

    def __init__(self, journaling: bool) -> None:
        self.journaling = journaling
        self.origin = (0, 0)
        self._answers: list[Effect] = []
        self._frees: dict[int, list[int]] = {}
        self._records: list[Effect] = []

    def answer(self, client: int, request: int, result: Reply | TransferQueueError) -> None:
        if isinstance(result, TransferQueueError):
            self._answers.append(Answer(client, request, error=result))
        else:
            self._answers.append(Answer(client, request, reply=result))

    def free(self, unit: int, blocks: Iterable[int]) -> None:
        self._frees.setdefault(unit, []).extend(blocks)

    def record(self, record: Record) -> None:
        """Call only while ``journaling``: the caller saves the building of the record otherwise."""
        self._records.append(Journal(record, *self.origin))

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Changes within are no news: nothing is recorded."""
        journaling, self.journaling = self.journaling, False
        try:
            yield
        finally:
            self.journaling = journaling

    @property
    def pending(self) -> bool:
        """Return whether there are records to drain."""
        return bool(self._records)

    def drain(self) -> list[Effect]:
        if not (self._records or self._frees or self._answers):
            return []
        effects = self._records
        effects += [FreeBlocks(unit, blocks) for unit, blocks in self._frees.items()]
        effects += self._answers
        self._records, self._frees, self._answers = [], {}, []
        return effects
