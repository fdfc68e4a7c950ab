"""Each promise of the docs names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("page", "start"),
    [("guarantees.md", "## What survives what"), ("backends.md", "What happens when something fails")],
)
def test_every_row_names_a_test_that_exists(page: str, start: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    section = text.split(start)[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert named, f"no test is named: {row}"
        for file, test in named:
            tree = ast.parse((ROOT / file).read_text())
            names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert test in names, f"{file} has no {test}"
