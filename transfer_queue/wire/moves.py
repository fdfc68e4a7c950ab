"""Messages that move a partition from one controller to another: see `transfer_queue.control.moves`."""

from __future__ import annotations

from typing import TypeAlias

from transfer_queue.control.requests import USERS, Request, Scope
from transfer_queue.wire.base import FromController

__all__ = [
    "Dismiss",
    "Export",
    "Exported",
    "Leave",
    "ListMoves",
    "MoveRequest",
    "Receive",
    "Settle",
    "StopExport",
]


class Export(Request, frozen=True, tag=True, omit_defaults=True):
    """Give me the state of the partition, and keep its blocks readable until the next Export of this connection, its
    Leave, StopExport or the end of the connection.

    ``hold``: put off requests that change the partition until Leave or StopExport, for a few seconds at most. Answer:
    Exported, with msgpack of {state: ``control.moves.export``, seal: of the proof that Leave gives, empty without a
    hold, clients: names by number of those that have rows on lease} as payload.
    """

    partition: str
    hold: bool = False


class Exported(FromController, frozen=True, tag=True, omit_defaults=True):
    """See Export."""


class StopExport(Request, frozen=True, tag=True, omit_defaults=True):
    """The partition stays. Answer: Done."""

    partition: str


class Receive(Request, frozen=True, tag=True, omit_defaults=True):
    """Keep the partition's state and ``clients`` in the payload (see Export), whose blocks this client has stored,
    until Settle or Dismiss. It replaces what was received before. Answer: Done."""

    partition: str
    seal: str
    source: int


class Leave(Request, frozen=True, tag=True, omit_defaults=True):
    """The partition is on controller ``shard`` from now on, which has received it under ``seal``. Answer: Value(proof).

    WaitTimeoutError if the hold of this connection's Export with that seal has ended; then the partition stays.
    """

    partition: str
    seal: str
    shard: int


class Settle(Request, frozen=True, tag=True, omit_defaults=True):
    """The partition's source says ``proof``: serve it. Answer: Done, also if there is nothing to do."""

    roles = USERS
    scope = Scope.PARTITION

    partition: str
    proof: str


class Dismiss(Request, frozen=True, tag=True, omit_defaults=True):
    """The source has not let the partition go, and its mover is gone. Answer: Value(bool), was there such a state."""

    partition: str
    seal: str


class ListMoves(Request, frozen=True, tag=True, omit_defaults=True):
    """Answer: Value({away: {partition: [shard, proof]}, here: partitions, arriving: {partition: [source, seal]},
    leaving: {partition: seal}})."""


MoveRequest: TypeAlias = Dismiss | Export | Leave | ListMoves | Receive | Settle | StopExport
