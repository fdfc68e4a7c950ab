"""The learning curve and the table at the end."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from stages import Stage, Stages

__all__ = ["Curve", "print_table"]

console = Console(highlight=False, soft_wrap=True)
_LINE_EVERY_S = 1.0
_BAR = 40


class Curve:
    """Prints the mean return as training goes on, at most a line a second."""

    def __init__(self, goal: float) -> None:
        self.episodes = 0
        self._goal = goal
        self._printed = -_LINE_EVERY_S

    def add(self, update: int, episodes: int, mean: float, after: float, *, finished: bool) -> None:
        """``mean``: of the returns of the last 20 episodes. ``after``: seconds since training began."""
        self.episodes += episodes
        if finished or after - self._printed >= _LINE_EVERY_S:
            self._printed = after
            bar = "█" * round(_BAR * min(1.0, mean / self._goal))
            console.print(f"{after:6.1f} s  update {update:3d}  episodes {self.episodes:5d}  return {mean:6.1f}  {bar}")


def print_table(
    trainer: Stages, rollouts: Sequence[dict[str, dict[str, float]]], episodes: int, elapsed: float
) -> None:
    """``rollouts``: :meth:`Stages.as_dict` of each worker; their times are added up."""
    together = Stages()
    for report in rollouts:
        for name, values in report.items():
            together.setdefault(name, Stage()).add(Stage(**values))  # type: ignore[arg-type]
    table = Table(box=None, pad_edge=False)
    table.add_column("stage")
    for column in ("calls", "MB", "MB/s", "ms a call", "seconds", "share"):
        table.add_column(column, justify="right")
    for title, stages, processes in (
        (f"{len(rollouts)} rollout workers", together, len(rollouts)),
        ("trainer", trainer, 1),
    ):
        table.add_row(f"[bold]{title}[/]")
        for name, stage in stages.items():
            table.add_row(f"  {name}", *_cells(stage, elapsed * max(1, processes)))
    put, got = together.get("put episode", Stage()), trainer.get("get batch", Stage())
    console.print()
    console.print(table)
    console.print(
        f"\n{episodes} samples, {got.nbytes / 1e6:.1f} MB through the queue in {elapsed:.1f} s:"
        f" put {_rate(put)} MB/s, get {_rate(got)} MB/s"
    )


def _cells(stage: Stage, elapsed: float) -> list[str]:
    moved = f"{stage.nbytes / 1e6:.2f}" if stage.nbytes else ""
    return [
        str(stage.calls),
        moved,
        _rate(stage) if stage.nbytes else "",
        f"{1000 * stage.seconds / max(1, stage.calls):.2f}",
        f"{stage.seconds:.2f}",
        f"{stage.seconds / elapsed:.0%}",
    ]


def _rate(stage: Stage) -> str:
    return f"{stage.nbytes / 1e6 / stage.seconds:.1f}" if stage.seconds else "0"
