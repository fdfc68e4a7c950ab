"""What the workloads ask of a peer."""

from __future__ import annotations

from typing import Any

from bench.data import Batch


class Peer:
    """A store of batches. Peers that are queues have more: see ``bench.peers.queue``."""

    name: str
    """The module it is from; set by ``bench.serve``."""

    def start(self, attach: dict[str, Any] | None) -> None:
        """Start servers, or join those that ``attach`` describes."""

    def stop(self) -> None:
        """End what ``start`` started."""

    def prepare(self, batch: Batch) -> Any:
        """``batch`` in the form that a user of this peer would have it in."""
        raise NotImplementedError

    def put(self, prepared: Any) -> None:
        raise NotImplementedError

    def get(self) -> Any:
        """The whole batch, as the peer's users get it."""
        raise NotImplementedError

    def column(self, got: Any, name: str) -> Any:
        """A dense column of what ``get`` returned as an array, for checking."""
        raise NotImplementedError

    def drop(self) -> None:
        """Forget the batch."""

    def prepare_small(self) -> Any:
        """One row of 256 float32 (1 KB)."""
        raise NotImplementedError

    def put_small(self, number: int, prepared: Any) -> None:
        raise NotImplementedError

    def get_small(self, number: int) -> Any:
        raise NotImplementedError
