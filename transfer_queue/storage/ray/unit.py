"""Unit side of the Ray backend: keeps the actor that owns the unit's blocks, and notices its end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from transfer_queue.config.document import validate_document
from transfer_queue.errors import ConnectionLostError, StartError, TransferQueueError
from transfer_queue.storage.base import StoreContext, UnitStats, UnitStore
from transfer_queue.storage.ray.cluster import RayStoreSettings, answer, connect, first_line
from transfer_queue.storage.ray.owner import BlockOwner, DirectOwner

__all__ = ["RayStore", "open_store"]

_WATCH_S = 1.0
_ANSWER_S = 30.0
_START_S = 120.0
"""Ray starts a process for the owner, which imports torch if a transport needs it."""


class RayStore(UnitStore):
    """See `UnitStore`."""

    def __init__(self, context: StoreContext, settings: RayStoreSettings) -> None:
        self._context = context
        self._settings = settings
        self._joined = False
        self._owner: Any = None
        self._name = ""
        self._usage = (0, 0)
        self._watch: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Raises ConfigError, StartError."""
        self._joined = await asyncio.to_thread(connect, self._settings)
        try:
            await self._make_owner()
        except (RayError, TransferQueueError) as error:
            raise StartError(f"the owner of the blocks of {self._context.name} did not start in Ray: {error}") from None
        self._watch = asyncio.create_task(self._watch_for_ever())

    def attributes(self) -> dict[str, Any]:
        return {"owner": self._name, "namespace": self._settings.namespace}

    async def free(self, blocks: Sequence[int]) -> None:
        with suppress(RayActorError):  # they are gone with the owner
            await self._ask("free", list(blocks))

    async def inventory(self) -> list[int]:
        try:
            return list(await self._ask("held"))
        except RayActorError:
            return []

    def stats(self) -> UnitStats:
        """Sampled about once a second."""
        used, blocks = self._usage
        return UnitStats(self._context.capacity, used, blocks)

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        owner, self._owner = self._owner, None
        if owner is not None and ray.is_initialized():
            await asyncio.to_thread(ray.kill, owner)
        if self._joined:
            self._joined = False
            await asyncio.to_thread(ray.shutdown)

    async def _watch_for_ever(self) -> None:
        while True:
            try:
                self._usage = await self._ask("usage")
            except RayActorError:
                self._context.log("the actor that owned this unit's blocks died, and the blocks with it")
                with suppress(RayError, TransferQueueError):  # tried again
                    await self._make_owner()
                    self._context.lost()
            except TransferQueueError as error:
                self._context.log(str(error))
            await asyncio.sleep(_WATCH_S)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """What the owner answers. Raises RayActorError if it is dead, with all it held; ConnectionLostError for what
        may pass, WaitTimeoutError."""
        try:
            return await answer(getattr(self._owner, method).remote(*arguments), _ANSWER_S)
        except RayError as error:
            if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
                raise
            raise ConnectionLostError(
                f"the actor that owns the blocks of {self._context.name} cannot be asked: {first_line(error)}"
            ) from None

    async def _make_owner(self) -> None:
        """On this node, so that the unit and its owner are lost together."""
        name = f"tq-blocks-{self._context.name}-{secrets.token_hex(4)}"
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        transport, capacity = self._settings.transport, self._context.capacity
        options: dict[str, Any] = {"name": name, "namespace": self._settings.namespace, "scheduling_strategy": here}
        if transport == "transferqueue":  # what one put leaves between blocks is not counted
            options["runtime_env"] = {"env_vars": {"TQ_RAY_CAPACITY": str(2 * capacity)}}
        kind = BlockOwner if transport == "object_store" else DirectOwner
        owner = kind.options(**options).remote(capacity, transport)
        self._usage = await answer(owner.usage.remote(), _START_S)
        self._owner, self._name = owner, name


async def open_store(context: StoreContext) -> RayStore:
    """Raises ConfigError, StartError."""
    store = RayStore(context, validate_document(RayStoreSettings, context.settings, "backend ray"))
    await store.open()
    return store
