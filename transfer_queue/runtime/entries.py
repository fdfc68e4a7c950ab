"""What the controller's journal holds besides the core's records: its clients and units, and what they were told."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from transfer_queue.control.commands import AnyReply
from transfer_queue.control.records import AnyRecord, Record
from transfer_queue.wire.messages import ENCODER, UnitInfo

__all__ = [
    "BlocksFenced",
    "Entry",
    "KeptReply",
    "RunBegan",
    "SavedSession",
    "SavedState",
    "SavedUnit",
    "SessionClosed",
    "SessionOpened",
    "UnitRegistered",
    "decode_batch",
    "encode_batch",
]


class RunBegan(Record, frozen=True, tag=True):
    """The first entry of a journal. Clients and units know the queue's life by ``run``."""

    run: str


class SessionOpened(Record, frozen=True, tag=True):
    writer: int
    client_id: str


class SessionClosed(Record, frozen=True, tag=True):
    writer: int


class KeptReply(Record, frozen=True, tag=True):
    """The answer to ``request`` of ``writer``, in case it asks again."""

    writer: int
    request: int
    reply: AnyReply


class BlocksFenced(Record, frozen=True, tag=True):
    """Freed before their commit came, which is to be refused."""

    blocks: list[int]


class UnitRegistered(Record, frozen=True, tag=True):
    """A unit got its number."""

    info: UnitInfo
    incarnation: str


class SavedSession(msgspec.Struct, frozen=True, array_like=True):
    writer: int
    client_id: str
    replies: dict[int, AnyReply]
    fenced: list[int]


class SavedUnit(msgspec.Struct, frozen=True, array_like=True):
    info: UnitInfo
    incarnation: str


class SavedState(msgspec.Struct, frozen=True):
    """A snapshot. ``core``: what ``ControlCore.snapshot`` returned. ``lost`` units may come back with their blocks."""

    run: str
    core: dict[str, object]
    sessions: list[SavedSession]
    units: list[SavedUnit]
    lost: list[SavedUnit]
    next_unit: int


Entry: TypeAlias = AnyRecord | RunBegan | SessionOpened | SessionClosed | KeptReply | BlocksFenced | UnitRegistered

_BATCH = msgspec.msgpack.Decoder(list[Entry])


def encode_batch(entries: list[Record]) -> bytes:
    """One batch of the journal."""
    return ENCODER.encode(entries)


def decode_batch(data: bytes) -> list[Record]:
    """Raises msgspec.DecodeError, for example for entries of a later version."""
    return _BATCH.decode(data)  # type: ignore[return-value]
