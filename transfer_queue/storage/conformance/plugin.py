"""The options of the conformance suite, added to pytest only when the suite is asked for.

pytest loads this at each start in an environment with transfer_queue, so it imports nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_PACKAGE = "transfer_queue.storage.conformance"
_FOLDER = Path(__file__).parent


def _is_asked_for(argument: str) -> bool:
    if argument.startswith(_PACKAGE):
        return True
    path = Path(argument.split("::")[0])
    return path.exists() and (path.resolve() == _FOLDER or _FOLDER in path.resolve().parents)


def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> None:
    if any(_is_asked_for(argument) for argument in args if not argument.startswith("-")):
        group = parser.getgroup("transfer_queue backends")
        group.addoption("--backend", required=True, metavar="NAME", help="storage backend to test")
        group.addoption(
            "--backend-settings",
            type=_settings,
            default={},
            metavar="JSON",
            help="settings of the backend, over those that its TESTING module gives",
        )


def _settings(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise TypeError("a JSON object is expected")
    return value
