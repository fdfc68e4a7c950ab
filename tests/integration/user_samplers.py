"""Samplers as a user writes them, for the controllers of tests."""

from __future__ import annotations

from typing import Any

from transfer_queue.sampler import BaseSampler


class NewestFirst(BaseSampler):
    """The highest indexes first; ``keep`` in the sampling config: none of them counts as consumed."""

    def __init__(self, reverse: bool = False) -> None:
        super().__init__()
        self.reverse = reverse

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        assert type(ready_indexes) is list
        chosen = ready_indexes[:batch_size] if self.reverse else ready_indexes[::-1][:batch_size]
        return chosen, [] if kwargs.get("keep") else chosen


class Highest(BaseSampler):
    """The row of the highest of ``scores``, an array."""

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        scores: Any = kwargs["scores"]
        chosen = [ready_indexes[int(scores[ready_indexes].argmax())]]
        return chosen, chosen


class Unruly(BaseSampler):
    """Answers with what the sampling config says, or raises it."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
        what = kwargs.get("what")
        if what == "raise":
            raise LookupError("no such thing")
        if what == "exit":
            raise SystemExit(3)
        if what == "unknown":
            return [10**12], []
        if what == "many":
            return ready_indexes, ready_indexes
        if what == "twice":
            return [ready_indexes[0]] * 2, []
        if what == "words":
            return "ab", []
        if what == "one":
            return ready_indexes
        return ready_indexes[:batch_size], ready_indexes[:batch_size]


class Failing(BaseSampler):
    """Cannot be made."""

    def __init__(self, path: str = "nowhere") -> None:
        super().__init__()
        raise OSError(f"cannot open {path}")

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError
