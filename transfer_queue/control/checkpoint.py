"""Capture the state of a queue for a checkpoint, and load a captured state into a queue."""

from __future__ import annotations

from typing import Any

from transfer_queue.control import snapshot
from transfer_queue.control.core import ControlCore
from transfer_queue.control.description import validate
from transfer_queue.control.records import LoadBegan, LoadEnded, StateAdopted
from transfer_queue.control.sampler_adapter import FAULTS
from transfer_queue.control.state import ControlState
from transfer_queue.errors import CapacityError, DataLostError, QueueNotEmptyError, RequestError, SamplerError

__all__ = [
    "EXTENT_BITS",
    "NO_UNIT",
    "SHARD_BITS",
    "adopt",
    "begin_load",
    "capture",
    "check_empty",
    "counted",
    "end_load",
    "saved_sampler",
]

NO_UNIT = -1
"""In an adopted state: the storage unit of blocks whose bytes are lost."""
EXTENT_BITS = 20
SHARD_BITS = 48
"""An extent of row indexes starts at its number times 2**EXTENT_BITS, plus its shard times 2**SHARD_BITS."""


def saved_sampler(core: ControlCore) -> list[Any]:
    """Class and state of the sampler. Raises SamplerError if a user's sampler cannot save its own."""
    sampler = core.sampler
    try:
        kept = sampler.save_checkpoint()
    except FAULTS as error:  # boundary to a user's code
        raise SamplerError(f"{type(sampler).__name__}.save_checkpoint raised {type(error).__name__}") from error
    return [type(sampler).__name__, kept]


def capture(core: ControlCore, sampler: list[Any] | None = None) -> dict[str, Any]:
    """The whole state at this moment, as plain data. ``sampler``: what `saved_sampler` returned, if it was called."""
    state_now = core.snapshot()
    del state_now["locks"]  # of clients that will not be there
    del state_now["moves"]  # a queue that loads it has partitions where their names put them
    return {"state": state_now, "sampler": sampler or saved_sampler(core)}


def adopt(
    core: ControlCore, captured: dict[str, Any], *, replace: bool = False, now: float | None = None
) -> dict[str, int]:
    """Adopt a captured state whose blocks have been stored under new ids. Rows keep their indexes in a new queue; in a
    queue that had rows they get higher indexes. A sampler of another class than the saved one starts without state.

    ``replace``: existing partitions are removed atomically; otherwise none may have rows. Returns the number of rows of
    each removed partition that had rows. ``now``: on the host's clock; tasks count as having fetched then.

    Raises QueueNotEmptyError, CapacityError, DataLostError, SamplerError, RequestError for a damaged state; then
    nothing changed.
    """
    state = core.state
    state.leases.now = state.leases.now if now is None else now
    if not replace:
        check_empty(core)
    moved = _moved(state, captured)
    for name in ("locks", "loading"):  # a checkpoint has none; a file that has some was made by hand
        moved.pop(name, None)
    scratch = ControlState(shard=state.space.shard)
    try:
        snapshot.load(scratch, moved)
        validate(scratch)
    except (KeyError, ValueError, TypeError, IndexError, AssertionError, AttributeError) as error:
        raise RequestError(f"the state is damaged: {type(error).__name__}: {error}") from error
    if core.sample_capacity is not None and scratch.rows > core.sample_capacity:
        raise CapacityError(
            f"the checkpoint has {scratch.rows} rows, the sample capacity of this queue is {core.sample_capacity}"
        )
    lost = sorted((state.units.lost - {NO_UNIT}) & set(scratch.blocks.unit.array[scratch.blocks.live_slots()].tolist()))
    if lost:
        raise DataLostError(f"storage unit {lost[0]} was lost while the checkpoint was loaded; load it again")
    name, kept = captured.get("sampler", ["", {}])
    if name == type(core.sampler).__name__:
        try:
            core.sampler.load_checkpoint(kept)
        except FAULTS as error:  # boundary to a user's code
            raise SamplerError(f"{name}.load_checkpoint raised {type(error).__name__}") from error
    else:
        for partition_name in state.partitions:
            core.serving.adapter.forget(partition_name)
    gone = state.rows_by_partition()
    snapshot.replace(state, moved)
    if state.log.journaling:
        state.log.record(StateAdopted(moved))
    if not state.loading:
        core.serve_all()
    return gone


def begin_load(core: ControlCore) -> None:
    """Several controllers take over a checkpoint, each its part with `adopt`: nobody is served before `end_load`."""
    if not core.state.loading:
        core.state.loading = True
        core.state.log.record(LoadBegan())


def end_load(core: ControlCore) -> None:
    """All controllers have the checkpoint, or none."""
    core.state.loading = False
    core.state.log.record(LoadEnded())
    core.serve_all()


def check_empty(core: ControlCore) -> None:
    """Raises QueueNotEmptyError if a partition has rows."""
    found = core.state.rows_by_partition()
    if found:
        raise QueueNotEmptyError(
            f"the queue is not empty, it has {counted(found)}; clear them first, load the checkpoint into a new queue, "
            "or replace the rows of the queue (replace=True, --replace of tq checkpoint load)"
        )


def counted(rows: dict[str, int]) -> str:
    """Describe the rows by partition, with the names of the first few partitions."""
    names = ", ".join(f"{name!r}"[:80] + f": {count}" for name, count in list(rows.items())[:5])
    more = f" and {len(rows) - 5} partitions more" if len(rows) > 5 else ""
    return f"{sum(rows.values())} rows ({names}{more})"


def _moved(state: ControlState, captured: dict[str, Any]) -> dict[str, Any]:
    """The state with extents that this controller has not given out."""
    try:
        found = captured["state"]
        shift = (state.space.used << EXTENT_BITS) + (state.space.shard << SHARD_BITS)
        partitions = [
            {**partition, "extents": [(start & ((1 << SHARD_BITS) - 1)) + shift for start in partition["extents"]]}
            for partition in found["partitions"]
        ]
        extents = found["extents"] + state.space.used
    except (KeyError, TypeError) as error:
        raise RequestError(f"the state is damaged: {type(error).__name__}: {error}") from error
    return {**found, "shard": state.space.shard, "extents": extents, "partitions": partitions}
