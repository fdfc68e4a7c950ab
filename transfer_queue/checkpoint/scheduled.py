"""Saves to a series, one at each of given moments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone

from transfer_queue.checkpoint.directory import CheckpointDirectory
from transfer_queue.checkpoint.series import Series
from transfer_queue.client.client import Client
from transfer_queue.config.schedule import next_time
from transfer_queue.errors import ConfigError, TransferQueueError

__all__ = ["moments", "save_at", "save_next"]

_NAP_S = 30.0
"""Longest sleep, so that a wall clock that is set is noticed."""


def moments(schedule: str) -> Iterator[None]:
    """Each step returns at the next time of ``schedule``. Raises ConfigError at once if it has none."""
    if next_time(schedule, datetime.now(timezone.utc)) is None:
        raise ConfigError(f"schedule: {schedule!r} never comes; correct its day and month")
    return _steps(schedule)


def _steps(schedule: str) -> Iterator[None]:
    while due := next_time(schedule, datetime.now(timezone.utc)):
        while (left := due.timestamp() - time.time()) > 0:
            time.sleep(min(left, _NAP_S))
        yield


def save_next(
    client: Client, series: Series, save: Callable[[CheckpointDirectory, CheckpointDirectory | None], None]
) -> bool:
    """Call ``save`` with the directory of the next checkpoint and the newest of this queue before it.

    False if the queue has no rows and the series has a checkpoint: a queue that lost its rows must not replace the
    checkpoints that have them.
    """
    if series.names() and not client.run(client.rows.row_counts):
        return False
    former = series.newest_own()
    save(series.begin(datetime.now(timezone.utc)), former)
    return True


def save_at(
    times: Iterable[None], series: Series, keep: int, save: Callable[[], None], tell: Callable[[str], None]
) -> None:
    """Call ``save`` at each of ``times``, then remove all but the newest ``keep`` checkpoints.

    A save that fails leaves the earlier ones; ``tell`` gets the reason, and the next save starts on schedule. Raises
    ConfigError.
    """
    for _ in times:
        try:
            save()
        except ConfigError:
            raise
        except (TransferQueueError, OSError) as error:
            tell(f"not saved: {error}; trying again at the next interval")
            continue
        try:
            series.prune(keep)
        except (TransferQueueError, OSError) as error:
            tell(f"saved, but earlier checkpoints were not removed: {error}; trying again after the next save")
