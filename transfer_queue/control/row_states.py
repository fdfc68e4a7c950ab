"""The states that a row has for each task, and every transition between them.

A row of a partition is FREE for a task that has not taken it. Whether a free row can be fetched depends on its cells:
all fields of the fetch have to be written and not lost with their storage unit. A cleared row has no state any more.

| from     | consume  | reserve  | lease  | give_back | give_back_batch | forget |
|----------|----------|----------|--------|-----------|-----------------|--------|
| FREE     | CONSUMED | RESERVED | LEASED |           |                 | FREE   |
| CONSUMED | CONSUMED |          |        | FREE      |                 | FREE   |
| RESERVED | CONSUMED |          | LEASED |           |                 | FREE   |
| LEASED   | CONSUMED |          | LEASED | FREE      | RESERVED        | FREE   |
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "CONSUME",
    "CONSUMED",
    "FORGET",
    "FREE",
    "GIVE_BACK",
    "GIVE_BACK_BATCH",
    "LEASE",
    "LEASED",
    "RESERVE",
    "RESERVED",
    "TAKES",
    "Transition",
]

# The numbers are part of the journal and of snapshots.
FREE = 0
CONSUMED = 1
RESERVED = 2
"""Drawn together with another rank's batch; handed out when its own rank asks for that batch."""
LEASED = 3
"""Handed out, and not acknowledged yet."""


class Transition(NamedTuple):
    """A column of the table: a row in one of the states ``sources`` gets the state ``target``."""

    sources: frozenset[int]
    target: int


CONSUME = Transition(frozenset({FREE, CONSUMED, RESERVED, LEASED}), CONSUMED)
"""The task fetched the row without a lease, or acknowledged it. A user's sampler may name a row again."""
RESERVE = Transition(frozenset({FREE}), RESERVED)
LEASE = Transition(frozenset({FREE, RESERVED, LEASED}), LEASED)
"""The task fetched the row and has to acknowledge it. A rank that asks for its batch again renews the lease."""
GIVE_BACK = Transition(frozenset({LEASED, CONSUMED}), FREE)
"""The lease ended. Acknowledged rows go back too if their group is drawn as a whole."""
GIVE_BACK_BATCH = Transition(frozenset({LEASED}), RESERVED)
"""The lease of a rank's batch ended: the rows go back to that rank only."""
FORGET = Transition(frozenset({FREE, CONSUMED, RESERVED, LEASED}), FREE)
"""The row is cleared."""

TAKES = {transition.target: transition for transition in (CONSUME, RESERVE)}
"""The transition that a `RowsConsumed` record carries out, by the state in the record."""
