"""What a type checker and ``help()`` tell a user."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import transfer_queue as tq
from tests.compat import contract
from tests.compat.test_public_api import attribute

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def mypy(program: str) -> str:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--show-error-codes", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    return done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_a_user_program_passes_the_strict_type_checker() -> None:
    assert mypy("tests/typing/user_program.py") == ""


@pytest.mark.timeout(600)
def test_the_type_checker_finds_mistakes_in_calls() -> None:
    wanted = {
        number: found.group(1)
        for number, line in enumerate((HERE / "mistakes.py").read_text().splitlines(), 1)
        if (found := re.search(r"# error: ([a-z-]+)", line))
    }
    reported = re.findall(r"mistakes\.py:(\d+): error: .*\[([a-z-]+)\]", mypy("tests/typing/mistakes.py"))
    assert len(wanted) == 9
    assert {int(number): code for number, code in reported} == wanted


def public_objects() -> Iterator[tuple[str, Any]]:
    """Every public module, function, class and its own members."""
    found = {name: attribute(tq, name) for name in {*tq.__all__, *contract.TOP_LEVEL} - {"__version__"}}
    found["transfer_queue"] = tq
    for module, names in contract.MODULES.items():
        loaded = importlib.import_module(module)
        found[module] = loaded
        found.update({f"{module}.{name}": attribute(loaded, name) for name in names})
    errors = importlib.import_module("transfer_queue.errors")
    found.update({f"transfer_queue.errors.{name}": getattr(errors, name) for name in errors.__all__})
    for name, value in found.items():
        yield name, value
        if inspect.isclass(value):
            yield from members(name, value)


def members(name: str, kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        if base.__module__.startswith("transfer_queue"):
            for member, value in vars(base).items():
                own = isinstance(value, property) or inspect.isfunction(getattr(value, "__func__", value))
                if own and not member.startswith("_"):
                    yield f"{name}.{member}", value


def test_everything_public_is_documented_here_or_in_the_base_that_it_overrides() -> None:
    missing = sorted({name for name, value in public_objects() if not (inspect.getdoc(value) or "").strip()})
    assert missing == []


def test_a_docstring_that_refers_to_another_refers_to_one_that_says_something() -> None:
    objects = dict(public_objects())
    dangling = []
    for name, value in objects.items():
        refers = re.fullmatch(r"See ``(?:TransferQueueClient\.)?(\w+)``\.", (value.__doc__ or "").strip())
        if refers:
            target = refers.group(1)
            documents = [other.__doc__ for path, other in objects.items() if path.rpartition(".")[2] == target]
            if not any(text and not text.startswith("See ") for text in documents):
                dangling.append((name, target))
    assert dangling == []


@pytest.mark.parametrize("name", [*contract.TWINS, "init", "get_client", *contract.CLIENT])
def test_the_help_of_a_call_that_can_fail_names_its_errors(name: str) -> None:
    value = getattr(tq, name, None) or getattr(tq.TransferQueueClient, f"async_{name}")
    if name in (
        "close",
        "BaseSampler",
        "SequentialSampler",
        "RankAwareSampler",
        "StorageKeyNotFoundError",
        "ZMQServerInfo",
    ):
        return
    assert re.search(r"Raises:?\s+[A-Z]\w+|Raises as|else as", value.__doc__), value.__doc__
