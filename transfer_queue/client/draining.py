"""Emptying a storage unit: its blocks are copied to other units, and rows follow them, while everybody goes on.

``python -m transfer_queue.client.draining --config FILE``, with the StorageUnitConfig of a unit, empties that unit: for
a hook that runs before the unit's process is ended, and for ``kubectl tq drain``. It shows the servers what the unit
itself shows, which is enough to empty the unit.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import re
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from transfer_queue.client.engine import Engine
from transfer_queue.client.shards import attach, engines_of
from transfer_queue.client.windows import windows
from transfer_queue.config.attach import join_address
from transfer_queue.config.document import load_document
from transfer_queue.config.processes import StorageUnitConfig
from transfer_queue.config.security import PeerSecurity
from transfer_queue.control.commands import BlockRef
from transfer_queue.errors import (
    CapacityError,
    ConnectionLostError,
    DataLostError,
    StorageKeyNotFoundError,
    TransferQueueError,
    WaitTimeoutError,
)
from transfer_queue.storage.base import UnitInfo
from transfer_queue.wire.messages import Drain, Relocate, Retire

__all__ = ["Drained", "drain_unit", "main", "undrain_unit"]

log = logging.getLogger(__name__)

T = TypeVar("T")
_REQUEST_S = 30.0
_CONNECT_S = 20.0
_ALONE_S = 10.0
"""Time without another writable unit after which a drain fails: the whole queue is probably ending."""
_ABSENT_S = 0.5
"""Time that an empty unit waits for the answers of its controllers."""
_PAUSE_S = 0.2
_BLOCKS = 64
_WINDOW_BYTES = 64 << 20


class Drained(NamedTuple):
    """Blocks and bytes that a drain moved."""

    blocks: int
    nbytes: int


async def drain_unit(
    addresses: list[str],
    name: str,
    *,
    security: PeerSecurity | None = None,
    timeout_s: float = math.inf,
    retire: bool = False,
    progress: Callable[[Drained], None] = lambda done: None,
) -> Drained:
    """Move every block of storage unit ``name`` to other units; it takes no new ones from now on.

    Where the others have no room, waits until rows are cleared. ``retire``: the unit is about to end; writers that were
    about to commit blocks there store them elsewhere. ``security``: what is shown to the servers; where a policy keeps
    tenants apart it takes an admin of all partitions, or the unit's own principal. Raises RequestError for an unknown
    unit, CapacityError if no other unit takes blocks, WaitTimeoutError after ``timeout_s`` seconds,
    ConnectionLostError, NotAuthorizedError. Rows stay readable at every moment, also after an error.
    """
    total = Drained(0, 0)

    def add(more: Drained) -> None:
        nonlocal total
        total = Drained(total.blocks + more.blocks, total.nbytes + more.nbytes)
        progress(total)

    attached = await attach(addresses, f"drain-{name}", _copy, security, _CONNECT_S)
    try:  # each controller has rows of its own there
        await asyncio.gather(*(_Mover(engine, name, timeout_s, add).run(retire) for engine in engines_of(attached)))
        return total
    finally:
        await attached.close()


async def undrain_unit(addresses: list[str], name: str, *, security: PeerSecurity | None = None) -> None:
    """Let the unit take new blocks again. Raises RequestError, ConnectionLostError, NotAuthorizedError."""
    attached = await attach(addresses, f"drain-{name}", _copy, security, _CONNECT_S)
    try:
        await asyncio.gather(*(engine.ask(Drain(name, stop=True), _REQUEST_S) for engine in engines_of(attached)))
    finally:
        await attached.close()


async def _copy(work: Callable[[], T]) -> T:
    return work()  # this loop has nothing else to do


class _Mover:
    def __init__(self, engine: Engine, name: str, timeout_s: float, moved: Callable[[Drained], None]) -> None:
        self._engine = engine
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + timeout_s
        self._timeout_s = timeout_s
        self._moved = moved
        self._accompanied = self._loop.time()  # when another unit last took blocks

    async def run(self, retire: bool) -> None:
        while True:
            found = (await self._engine.ask(Drain(self._name, _BLOCKS), _REQUEST_S)).value
            unit = found["unit"]
            blocks, sizes = (np.frombuffer(found[key], "<i8").tolist() for key in ("blocks", "nbytes"))
            if not blocks:
                if not retire or (await self._engine.ask(Retire(unit), _REQUEST_S)).value:
                    return
                continue
            listed = zip(blocks, sizes, found["partitions"], strict=True)
            first = next(windows(listed, lambda block: block[1], _BLOCKS, _WINDOW_BYTES))
            moved = await self._move(unit, first)
            if moved:
                self._moved(Drained(len(moved), sum(moved)))
                self._accompanied = self._loop.time()
            else:
                self._check_hope(len(blocks))
                await asyncio.sleep(_PAUSE_S)

    def _check_hope(self, left: int) -> None:
        now = self._loop.time()
        if self._engine.writable_units:
            self._accompanied = now
        if now - self._accompanied > _ALONE_S:
            raise CapacityError(
                f"storage unit {self._name} still holds rows and no other unit takes blocks; add storage units"
            )
        if now > self._deadline:
            raise WaitTimeoutError(
                f"storage unit {self._name} still holds {left} blocks or more after {self._timeout_s:g} s: the other "
                "units have no room; clear rows or add storage units"
            )

    async def _move(self, unit: int, blocks: list[tuple[int, int, str]]) -> list[int]:
        """Copy blocks given as (number, bytes, partition) and let their rows follow. Returns the bytes of those that
        moved."""
        copies: dict[int, tuple[BlockRef, UnitInfo]] = {}
        try:
            if not await self._copy_in_parts(unit, blocks, copies):
                await self._copy_whole(unit, blocks, copies)
        except BaseException:
            await self._engine.discard_blocks([list(copies.values())])
            raise
        moved = await self._relocate(unit, copies)
        return [nbytes for number, nbytes, _ in blocks if number in moved]

    async def _copy_in_parts(
        self, unit: int, blocks: list[tuple[int, int, str]], copies: dict[int, tuple[BlockRef, UnitInfo]]
    ) -> bool:
        """One block after the other, if the backend can; else False."""
        for number, nbytes, partition in blocks:
            try:
                copy = await self._engine.copy_block(unit, number, nbytes, partition)
            except (CapacityError, StorageKeyNotFoundError, DataLostError, ConnectionLostError) as error:
                log.info("%s", error)  # a smaller one may find room, this one was cleared, or a unit is reconnecting
                continue
            if copy is None:
                return False
            copies[number] = copy
        return True

    async def _copy_whole(
        self, unit: int, blocks: list[tuple[int, int, str]], copies: dict[int, tuple[BlockRef, UnitInfo]]
    ) -> None:
        try:
            fetched = await self._engine.read_blocks([(unit, *block[:2]) for block in blocks], _REQUEST_S)
        except (StorageKeyNotFoundError, DataLostError, ConnectionLostError) as error:
            log.info("%s; its blocks are listed again", error)  # cleared meanwhile, or the unit is reconnecting
            return
        try:
            for (number, _, partition), block in zip(blocks, fetched.blocks, strict=True):
                try:
                    copies[number] = await self._engine.store_whole(block.view.select(None, None), partition, 0.0)
                except (CapacityError, ConnectionLostError) as error:
                    log.info("%s", error)  # a smaller one may find room
        finally:
            fetched.release()

    async def _relocate(self, unit: int, copies: dict[int, tuple[BlockRef, UnitInfo]]) -> set[int]:
        if not copies:
            return set()
        moves = [(number, ref.unit, ref.block) for number, (ref, _) in copies.items()]
        try:
            moved = set((await self._engine.ask(Relocate(unit, moves), _REQUEST_S)).value)
        except DataLostError as error:
            log.info("%s", error)
            moved = set()
        # An answer that is lost leaves the copies to the end of this session: what no row refers to is freed then.
        self._engine.settle([[copy for number, copy in copies.items() if number in moved]])
        await self._engine.discard_blocks([[copy for number, copy in copies.items() if number not in moved]])
        return moved


async def _drain(config: StorageUnitConfig, timeout_s: float) -> Drained:
    """Empty the unit of ``config``."""
    drain = asyncio.create_task(
        drain_unit(
            config.controller,
            config.name,
            security=config.security,
            timeout_s=timeout_s,
            retire=True,
            progress=lambda done: print(f"{done.blocks} blocks, {done.nbytes} bytes were moved", file=sys.stderr),
        )
    )
    await asyncio.wait({drain}, timeout=_ABSENT_S)
    if not drain.done() and await asyncio.to_thread(_holds_nothing, config):
        drain.cancel()
        await asyncio.wait({drain})
        raise ConnectionLostError(
            f"{config.name} holds nothing, and its controllers do not answer within {_ABSENT_S:g} s: "
            f"{', '.join(config.controller)}"
        )
    return await drain


def _holds_nothing(config: StorageUnitConfig) -> bool:
    """Whether the unit, beside which this runs, says that it has no block. False where it does not answer."""
    address = join_address(config.advertise_host or config.host, config.metrics_port or 0)
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=2) as answer:
            text = answer.read().decode()
    except OSError:
        return False
    found = re.findall(r"^tq_unit_(?:blocks|used_bytes)(?:{.*})? (\S+)$", text, re.MULTILINE)
    return bool(found) and not any(map(float, found))


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: the unit is empty and may end. 1: it is not, standard error says why."""
    parser = argparse.ArgumentParser(prog="transfer_queue.client.draining", description=main.__doc__)
    parser.add_argument("--config", type=Path, required=True, help="settings of the storage unit")
    parser.add_argument("--timeout", type=float, default=0.0, help="give up after so many seconds; 0: never")
    parser.add_argument("--cancel", action="store_true", help="let the unit take new blocks again")
    options = parser.parse_args(arguments)
    config = load_document(StorageUnitConfig, options.config)
    try:
        if options.cancel:
            asyncio.run(undrain_unit(config.controller, config.name, security=config.security))
            print(f"{config.name} takes new blocks again", file=sys.stderr)
            return 0
        done = asyncio.run(_drain(config, options.timeout or math.inf))
    except TransferQueueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{config.name} is empty: {done.blocks} blocks, {done.nbytes} bytes were moved", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
