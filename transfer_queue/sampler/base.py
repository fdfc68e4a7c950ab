"""The interface that user-written samplers implement."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

__all__ = ["BaseSampler"]


class BaseSampler(ABC):
    """Chooses rows for a fetch. The instance lives in the controller and is called for one fetch at a time.

    Subclasses implement `sample` and call ``super().__init__()``. Batches that must come out the same when asked for
    again can be kept in ``self._states[partition_id][task_name][dp_rank][batch_index]``; what is there is forgotten
    when the partition is cleared, and part of a checkpoint.
    """

    def __init__(self) -> None:
        self._states: dict[str, dict[str, dict[int, dict[Any, list[int]]]]] = {}

    @abstractmethod
    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Returns ``(sampled, consumed)``: the rows of the batch in order, and those that the task shall not get again.

        ``ready_indexes``: global indexes of the rows that are ready and not consumed, ascending. ``kwargs``: the
        fetch's sampling config, ``partition_id`` and ``task_name`` (unless the config has them), and ``partition``, an
        object with ``get_custom_meta(indexes) -> {index: tag}``. ``([], [])`` means that the rows do not suffice yet.
        What it raises reaches the fetching client only.
        """

    def __call__(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        return self.sample(ready_indexes, batch_size, *args, **kwargs)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Return whether the batch asked for was drawn before, so that the answer does not depend on what is ready
        now."""
        config = sampling_config or {}
        rank = config.get("dp_rank")
        batches = self._states.get(partition_id, {}).get(task_name, {}).get(rank, {}) if rank is not None else {}
        return config.get("batch_index") in batches

    def clear_cache(self, partition_id: str) -> None:
        """The partition was cleared: forget its batches."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """A copy of the state, for `load_checkpoint`."""
        return {"states": copy.deepcopy(self._states)}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Replace the state by one that `save_checkpoint` returned."""
        self._states = copy.deepcopy(state.get("states", {}))
