"""The recorded surface against the library that is here."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transfer_queue.compat.actor_class import ActorClass

__all__ = ["RECORDED", "RELEASES", "differences", "merge", "recorded"]

RECORDED = Path(__file__).with_name("recorded.json")
RELEASES = tuple(f"0.1.{number}" for number in range(5, 12))
Surface = dict[str, dict[str, str]]
"""Dotted name -> signature -> first and last release that have it so."""


def merge(described: Mapping[str, Mapping[str, str]]) -> Surface:
    """The table of all releases, oldest first."""
    merged: dict[str, dict[str, list[str]]] = {}
    for version, names in described.items():
        for name, text in names.items():
            merged.setdefault(name, {}).setdefault(text, []).append(version)
    return {name: {text: f"{at[0]} to {at[-1]}" for text, at in texts.items()} for name, texts in merged.items()}


def recorded() -> Surface:
    """The table as it was written."""
    found: Surface = json.loads(RECORDED.read_text())
    return found


def find(name: str) -> Any:
    """What a dotted name is here. Raises AttributeError."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
            if isinstance(found, ActorClass):
                found = getattr(importlib.import_module(found.own[0]), found.own[1])
        return found
    raise AttributeError(name)


def differences(surface: Surface) -> Iterator[tuple[str, str]]:
    """(name, what is wrong) of names that are absent here, and of calls that were right there and are wrong here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, texts in surface.items():
            try:
                found = find(name)
            except AttributeError:
                yield name, "absent"
                continue
            for text, releases in texts.items():
                if wrong := mismatch(text, found):
                    yield name, f"{releases}: {text}: {wrong}"


def mismatch(text: str, found: Any) -> str:
    """Why ``found`` cannot stand for what ``text`` describes; empty if it can."""
    if inspect.isclass(found) and issubclass(found, BaseException) and not text.startswith("("):
        bases = {base.__name__ for base in found.__mro__}
        return ", ".join(f"is no {base}" for base in text.split() if base not in bases)
    if not text.startswith("(") or text == "(...)":
        return ""  # a value, a property, a member: it is there
    return call_mismatch(text, inspect.signature(found)) if callable(found) else "cannot be called"


def call_mismatch(text: str, signature: inspect.Signature) -> str:
    ours = {name: item for name, item in signature.parameters.items() if name not in ("self", "cls")}
    kinds = inspect.Parameter
    starred = {item.kind for item in ours.values()}
    positional = [name for name, item in ours.items() if item.kind is kinds.POSITIONAL_OR_KEYWORD]
    theirs = ast.parse(f"lambda {re.sub('<[^>]*>', '...', text[1:-1])}: 0", mode="eval").body
    assert isinstance(theirs, ast.Lambda)
    given = theirs.args
    defaults = [None] * (len(given.args) - len(given.defaults)) + list(given.defaults)
    for number, (argument, default) in enumerate(zip(given.args, defaults, strict=True)):
        name = argument.arg
        if positional[number : number + 1] != [name] and kinds.VAR_POSITIONAL not in starred:
            return f"{name} is not argument {number + 1}"
        if wrong := argument_mismatch(name, default, ours, kinds.VAR_KEYWORD in starred):
            return wrong
    for argument, keyword_default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        if wrong := argument_mismatch(argument.arg, keyword_default, ours, kinds.VAR_KEYWORD in starred):
            return wrong
    known = {argument.arg for argument in (*given.args, *given.kwonlyargs)}
    needed = [name for name, item in ours.items() if item.default is kinds.empty and name not in known]
    return ", ".join(f"needs {name}" for name in needed if not starred_name(ours[name]))


def argument_mismatch(
    name: str, default: ast.expr | None, ours: Mapping[str, inspect.Parameter], takes_any: bool
) -> str:
    if name not in ours:
        return "" if takes_any else f"has no {name}"
    if default is None or not isinstance(default, ast.Constant) or default.value is ...:
        return ""
    return "" if ours[name].default == default.value else f"{name} is {ours[name].default!r} by default"


def starred_name(item: inspect.Parameter) -> bool:
    return item.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def unexplained(found: Iterable[tuple[str, str]], reasons: Mapping[str, str]) -> tuple[list[str], set[str]]:
    """The differences without a reason, and the reasons that none has. A reason is for names that match its pattern."""
    patterns = {pattern: re.compile(pattern) for pattern in reasons}
    used: set[str] = set()
    left = []
    for name, wrong in found:
        matching = [pattern for pattern, compiled in patterns.items() if compiled.fullmatch(name)]
        used.update(matching[:1])
        if not matching:
            left.append(f"{name}: {wrong}")
    return left, set(reasons) - used
