"""A hook of mkdocs: the navigation has what exists, and every page that exists is in the navigation."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Leave out entries without a page, and add pages without an entry under "More"."""
    folder = Path(config.docs_dir)
    listed: set[str] = set()
    config.nav = _existing(config.nav, folder, listed)
    more = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.md"))
    if others := [page for page in more if page not in listed]:
        config.nav.append({"More": others})
    return config


def _existing(entries: list[Any], folder: Path, listed: set[str]) -> list[Any]:
    kept: list[Any] = []
    for entry in entries:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            if inner := _existing(target, folder, listed):
                kept.append({title: inner})
        elif (folder / target).exists():
            listed.add(target)
            kept.append(entry)
    return kept
