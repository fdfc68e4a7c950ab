"""``tq top``: what keys do, and what stands first."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from transfer_queue.cli.output import Output
from transfer_queue.cli.top import View, watch


def picture(partitions: int) -> dict[str, Any]:
    """A queue with as many partitions; the trainer waits in the newest one, and a unit is drained."""
    unit = {"address": "127.0.0.1:1", "capacity": 100, "used": 0, "blocks": 0, "connected": True, "draining": True}
    return {
        "queue": "q",
        "backend": "simple",
        "rows": partitions,
        "sample_capacity": None,
        "clients": 1,
        "partitions": [
            {"name": f"train_{number}", "rows": 1, "bytes": 8, "fields": {"tokens": 1}, "lost": 0, "subscriptions": []}
            for number in range(partitions)
        ],
        "waiters": [
            {"task": "trainer", "partition": f"train_{partitions - 1}", "rows": 8, "waited_s": 3.0, "lacks": "reward"}
        ],
        "units": [{"name": "storage-0", **unit}],
    }


def lines(view: View, width: int = 100, height: int = 12, partitions: int = 30) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False)
    return view.frame(console, picture(partitions), None, "").plain.split("\n")


def test_who_waits_stands_first_then_the_newest_partition() -> None:
    shown = lines(View())
    assert len(shown) == 12
    assert shown[2].startswith("WAITS")
    assert shown[3].startswith("trainer")
    assert [line.split()[0] for line in shown[6:8]] == ["train_29", "train_28"]
    assert "lines below" in shown[-1]


def test_keys_scroll_filter_and_quit() -> None:
    view = View()
    assert view.press("down", 12)
    assert lines(view)[1].startswith("WAITS")
    for key in ["g", "/", *"train_7", "\n"]:
        assert view.press(key, 12)
    shown = lines(view)
    assert any(line.startswith("train_7 ") for line in shown)
    assert not any(line.startswith(("train_29", "trainer")) for line in shown)
    assert "filter: train_7" in shown[-1]
    assert view.press("esc", 12)
    assert view.press("page down", 12)
    last = lines(view, height=60)
    assert any("drained" in line for line in last)
    assert not view.press("q", 12)


def test_forty_columns_are_readable() -> None:
    shown = lines(View(), width=40, height=100)
    assert max(map(len, shown)) <= 40
    assert "train_29" in shown
    assert "  rows 1, bytes 8 B, tokens all" in shown


def test_a_pipe_has_the_width_of_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def shown() -> list[str]:
        watch(SimpleNamespace(look=lambda: picture(2)), Output.table, once=True, interval_s=1.0)  # type: ignore[arg-type]
        return capsys.readouterr().out.splitlines()

    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, shown())) <= 40
    monkeypatch.delenv("COLUMNS")
    assert any(line.startswith("WAITS  ") for line in shown())
