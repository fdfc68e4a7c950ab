"""The public surface of the ``transfer_queue`` on the import path, as names and signatures: JSON on standard output.

It runs in a process of its own, so it imports nothing of this repository.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

PACKAGE = "transfer_queue"


def modules() -> Iterator[Any]:
    """The modules of the package that can be imported."""
    package = importlib.import_module(PACKAGE)
    yield package
    for found in pkgutil.walk_packages(package.__path__, f"{PACKAGE}.", onerror=lambda _: None):
        if not any(part.startswith("_") for part in found.name.split(".")):
            try:
                yield importlib.import_module(found.name)
            except ImportError as error:
                print(f"{found.name}: {error}", file=sys.stderr)


def signature(function: Callable[..., Any]) -> str:
    """``(a, b=1, *, c)`` without annotations, and without the object or class that a method is called on."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    kept = [
        item.replace(annotation=inspect.Parameter.empty, default=plain(item.default))
        for name, item in found.parameters.items()
        if name not in ("self", "cls", "_ray_trace_ctx")  # the last one is Ray's
    ]
    return str(found.replace(parameters=kept, return_annotation=inspect.Signature.empty))


class Shown:
    """A default that is written the same way in each process."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def plain(default: Any) -> Any:
    if default is inspect.Parameter.empty or type(default) in (bool, int, float, str, type(None), tuple, list, dict):
        return default
    return Shown(f"<{type(default).__name__.strip('_')}>")


def own_class(value: Any) -> Any:
    """The class that a Ray actor class is made from; other values as they are."""
    return getattr(getattr(value, "__ray_metadata__", None), "modified_class", value)


def members(kind: type) -> Iterator[tuple[str, str]]:
    """Public methods and properties, those of the package's own bases included."""
    for name in dir(kind):
        if name.startswith("_"):
            continue
        owner = next((base for base in kind.__mro__ if name in vars(base)), kind)
        if owner.__module__.split(".")[0] != PACKAGE:
            continue
        static = inspect.getattr_static(kind, name)
        if callable(getattr(kind, name, None)):
            yield name, signature(getattr(kind, name))
        elif isinstance(static, property):
            yield name, "property"
        elif isinstance(kind, enum.EnumMeta):
            yield name, "member"


def describe() -> dict[str, str]:
    """Dotted name -> signature, ``property``, ``member``, ``value`` or, for errors, their bases."""
    found: dict[str, str] = {}
    for module in modules():
        exported = getattr(module, "__all__", ())
        for name, value in vars(module).items():
            value = own_class(value)
            home = getattr(value, "__module__", None)
            if name.startswith("_") or inspect.ismodule(value) or not (home == module.__name__ or name in exported):
                continue
            path = f"{module.__name__}.{name}"
            if not inspect.isclass(value):
                found[path] = signature(value) if callable(value) else "value"
            elif issubclass(value, BaseException):
                found[path] = " ".join(base.__name__ for base in value.__mro__ if base.__module__ == "builtins")
            else:
                found[path] = signature(value)
                if home == module.__name__:  # once, not on each path that it is exported on
                    found |= {f"{path}.{member}": text for member, text in members(value)}
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    json.dump(describe(), sys.stdout, indent=0, sort_keys=True)
