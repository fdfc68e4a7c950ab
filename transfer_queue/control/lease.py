"""Leases: rows that a task fetched and has not acknowledged, until when, and for which client.

A row that is leased is neither ready nor consumed. Acknowledging consumes it; when its lease ends before that, because
the time is up or its client is gone, it is ready again in its old place.
"""

from __future__ import annotations

from transfer_queue.control.arrays import Rows, row_count

__all__ = ["Lease"]


class Lease:
    """The rows that one fetch took and has to acknowledge. ``rows`` are ordinals, of which ``left`` are still under it.
    ``dealt``: as a rank's batch, which goes back to that rank only. ``seconds`` is how long it lasts, ``deadline`` when
    it ends, by the host's clock.
    """

    __slots__ = ("client", "deadline", "dealt", "left", "number", "rows", "seconds")

    def __init__(self, number: int, client: int, seconds: float, deadline: float, rows: Rows, dealt: bool) -> None:
        self.number = number
        self.client = client
        self.seconds = seconds
        self.deadline = deadline
        self.rows = rows
        self.left = row_count(rows)
        self.dealt = dealt
