"""Where a process spends its time, by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

__all__ = ["Stage", "Stages"]


@dataclass
class Stage:
    """Totals of one stage."""

    calls: int = 0
    seconds: float = 0.0
    nbytes: int = 0

    def add(self, other: Stage) -> None:
        self.calls += other.calls
        self.seconds += other.seconds
        self.nbytes += other.nbytes


class Stages(dict[str, Stage]):
    """Stages by name, in order of first use."""

    @contextmanager
    def time(self, name: str, nbytes: int = 0) -> Iterator[Stage]:
        """Add the time of the block to stage ``name``; its bytes can be added in the block."""
        stage = self.setdefault(name, Stage())
        began = time.monotonic()
        try:
            yield stage
        finally:
            stage.add(Stage(1, time.monotonic() - began, nbytes))

    def as_dict(self) -> dict[str, dict[str, float]]:
        """Plain values, to be sent to another process."""
        return {name: asdict(stage) for name, stage in self.items()}
