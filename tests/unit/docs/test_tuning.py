"""The page on tuning names settings that exist, with their defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "tuning.md").read_text()
CRD = ROOT / "charts" / "transferqueue" / "files" / "crds" / "transferqueues.yaml"


def field(path: str) -> dict[str, Any]:
    """The schema of a field of the resource."""
    found: dict[str, Any] = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in path.split("."):
        found = found["properties"][name]
    return found


def test_every_field_is_one_of_the_resource() -> None:
    paths = set(re.findall(r"`(spec\.[\w.]+)`", PAGE))
    assert len(paths) > 20
    for path in paths:
        assert field(path), path


def test_every_variable_is_read_by_the_library() -> None:
    names = set(re.findall(r"\bTQ_[A-Z_]+", PAGE))
    assert len(names) > 5
    source = "".join(path.read_text() for path in (ROOT / "transfer_queue").rglob("*.py"))
    assert {name for name in names if f'"{name}"' not in source} == set()


def test_a_default_of_one_field_is_as_the_resource_says() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if "`spec." in line]
    told = {}
    for cells in rows:
        for at, cell in enumerate(cells):
            if (named := re.fullmatch(r"`(spec\.[\w.]+)`( \(.+\))?", cell)) and at + 1 < len(cells):
                told[named[1]] = cells[at + 1].strip(" |")
    assert len(told) >= 8
    for path, default in told.items():
        expected = field(path).get("default")
        if isinstance(expected, bool | int | str):
            shown = str(expected).lower() if isinstance(expected, bool) else str(expected)
            assert default.split(":")[0] == shown, path
