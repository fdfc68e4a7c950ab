"""Moves of partitions from one controller to another: their steps, and the state that is moved.

A move has three steps, each kept in the journal of the controller that takes it. Controllers without a journal refuse
moves: one that restarts would not know where a partition is, and two would serve its name.

1. The target *receives* the partition's state with a seal. No request reaches it there yet.
2. The source lets the partition *leave*: it forgets the rows and keeps the proof that the seal was made of. This is
   the moment of the move: before it the move can be undone, after it every request gets the proof and the way to go.
3. The target *settles* the partition once a client shows the proof. From then on it serves the partition.

If the source changed the partition after it made the state, step 2 is refused. So the rows are in one place, whether
source, target or mover ends at any moment. What a killed mover leaves at the target is settled by the first client that
the source redirects, or dismissed by the next mover.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_queue.control import snapshot
from transfer_queue.control.arrays import Ints
from transfer_queue.control.directory import Arrival
from transfer_queue.control.records import ArrivalDismissed, PartitionArrived, PartitionLeft, PartitionSettled
from transfer_queue.control.wait_queue import Waiter
from transfer_queue.errors import CapacityError, RequestError, WaitTimeoutError

if TYPE_CHECKING:
    from transfer_queue.control.core import ControlCore

__all__ = ["dismiss", "export", "leave", "receive", "seal_of", "settle", "take_waiters"]


def seal_of(proof: str) -> str:
    """The hash by which a target recognizes the proof."""
    return hashlib.sha256(proof.encode()).hexdigest()


def export(core: ControlCore, name: str) -> dict[str, Any]:
    """The state of one partition with the table of its blocks, as plain data; no rows if there is no such partition.

    Raises RequestError for a partition that cannot be moved, WaitTimeoutError while keys of it are locked.
    """
    state = core.state
    if core.serving.adapter.planned is None:
        raise RequestError(
            f"partition {name!r} cannot be moved: the sampler {core.serving.adapter.name} keeps a state of its own for "
            "all partitions of a controller; only built-in samplers move"
        )
    if keys := state.locks.keys_of(name):
        raise WaitTimeoutError(f"partition {name!r} cannot be moved while keys of it are locked: {keys[:5]}")
    partition = state.partitions.get(name)
    if partition is None:
        return {"blocks": state.blocks.dump_slots(np.zeros(0, np.int64)), "partitions": []}
    if partition.count_lost():
        raise RequestError(
            f"partition {name!r} cannot be moved: {partition.count_lost()} of its rows are lost with a storage unit; "
            "wait for the unit, or clear them"
        )
    dumped = snapshot.dump_partition(partition)
    slots = [np.frombuffer(raw, np.int32) for _, raw, _ in dumped["families"]]
    used: Ints = np.unique(np.concatenate([np.zeros(0, np.int32), *slots])).astype(np.int64)
    used = used[used > 0]
    numbers = np.zeros(int(used.max(initial=0)) + 1, np.int32)
    numbers[used] = np.arange(1, len(used) + 1)
    families = [
        [names, numbers[np.frombuffer(raw, np.int32)].tobytes(), rows] for names, raw, rows in dumped["families"]
    ]
    return {"blocks": state.blocks.dump_slots(used), "partitions": [{**dumped, "families": families}]}


# --------------------------------------------------------------------------------------------------------- the source


def take_waiters(core: ControlCore, name: str) -> list[Waiter]:
    """Forget the parked requests for a partition, which would change it later. Returns them in order of arrival."""
    lines = core.wait_queue.lines(name).values()
    waiting = [waiter for line in lines for waiter in line.values()]
    waiting += [waiter for waiter in core.wait_queue.commits.values() if waiter.command.partition == name]
    for waiter in waiting:
        core.wait_queue.remove(waiter)
    core.admit_commits()  # which waited behind these
    return sorted(waiting, key=lambda waiter: waiter.number)


def leave(core: ControlCore, name: str, shard: int, proof: str) -> None:
    """Let the partition go to controller ``shard``. No request may be parked for it, see `take_waiters`."""
    state = core.state
    state.log.origin = (0, 0)
    partition = state.partitions.get(name)
    if partition is not None:
        with state.log.silenced():
            state.clear_partition(partition)
    state.moves.leave(name, shard, proof)
    if state.log.journaling:
        state.log.record(PartitionLeft(name, shard, proof))
    core.admit_commits()


# --------------------------------------------------------------------------------------------------------- the target


def receive(core: ControlCore, name: str, seal: str, source: int, content: dict[str, Any]) -> None:
    """Keep a partition's state, whose blocks the mover has stored here, until it is settled or dismissed.

    Raises RequestError for a damaged state and for a partition that is here, CapacityError.
    """
    state = core.state
    if name in state.moves.here or name in state.partitions:
        raise RequestError(f"partition {name!r} is on this controller already")
    scratch = type(state)(shard=state.space.shard)
    scratch.queueing = state.queueing
    try:
        snapshot.enter(scratch, name, content, 1, [0] * _count_leases(content))
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise RequestError(f"the state is damaged: {type(error).__name__}: {error}") from error
    if set(scratch.partitions) - {name}:
        raise RequestError(f"the state is of another partition than {name!r}")
    if core.sample_capacity is not None and state.rows + scratch.rows > core.sample_capacity:
        raise CapacityError(
            f"partition {name!r} has {scratch.rows} rows, and {state.rows} of the {core.sample_capacity} that this "
            "controller may have exist; clear rows or raise controller.sampleCapacity"
        )
    if name in state.moves.arriving:
        state.drop_arrival(name, content)
    state.moves.arriving[name] = Arrival(seal, source, content)
    if state.log.journaling:
        state.log.origin = (0, 0)
        state.log.record(PartitionArrived(name, seal, source, content))


def settle(core: ControlCore, name: str, proof: str, clients: Mapping[int, int]) -> None:
    """Serve a partition that has left its source; ``proof`` shows this. Without it nothing changes.

    ``clients``: number of a client at the source -> its number here. Leases of other clients end.
    """
    state, moves = core.state, core.state.moves
    arrival = moves.arriving.get(name)
    if arrival is None or not hmac.compare_digest(arrival.seal, seal_of(proof)):
        return
    leases = [
        clients.get(client, 0)
        for partition in arrival.content["partitions"]
        for _, _, client, *_ in partition.get("leases", ())
    ]
    first = state.leases.next_number
    with state.log.silenced():
        snapshot.enter(state, name, arrival.content, first, leases)
        moves.settle(name)
    if state.log.journaling:
        state.log.origin = (0, 0)
        state.log.record(PartitionSettled(name, first, leases))
    partition = state.partitions.get(name)
    if partition is not None:
        for task in list(partition.tasks.values()):
            task.last_fetch = state.leases.now
            for lease in [lease for lease in task.leases.values() if not lease.client]:
                partition.end_lease(task, lease, partition.returning(task, lease))
        core.serving.adopt(partition)
        core.serving.serve(partition, partition.subscriptions.values())


def dismiss(core: ControlCore, name: str, seal: str) -> bool:
    """Forget a received state whose move with this seal will not take place. False: there is none."""
    arrival = core.state.moves.arriving.get(name)
    if arrival is None or arrival.seal != seal:
        return False
    core.state.drop_arrival(name)
    if core.state.log.journaling:
        core.state.log.origin = (0, 0)
        core.state.log.record(ArrivalDismissed(name))
    return True


def _count_leases(content: Mapping[str, Any]) -> int:
    return sum(len(partition.get("leases", ())) for partition in content.get("partitions", ()))
