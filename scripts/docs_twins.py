"""A griffe extension: the blocking twin of an ``async_`` function is a function of the API reference, too."""

from __future__ import annotations

import copy
from typing import Any

import griffe

TWINS = "transfer_queue.client.twins.blocking"


class Twins(griffe.Extension):
    """Replaces ``name = blocking(async_name)`` by a function with the signature and docstring of ``async_name``."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Called once a package is loaded."""
        _replace(pkg)


def _replace(owner: griffe.Module | griffe.Class) -> None:
    for name, member in list(owner.members.items()):
        if member.is_alias:
            continue
        if isinstance(member, griffe.Module | griffe.Class):
            _replace(member)
            continue
        value = getattr(member, "value", None)
        if isinstance(value, griffe.ExprCall) and str(value.canonical_path) == TWINS:
            _put_twin(owner, name, str(value.arguments[0]))


def _put_twin(owner: griffe.Module | griffe.Class, name: str, target: str) -> None:
    holder = owner if "." not in target else owner.module[target.rpartition(".")[0]]
    twin = copy.copy(holder[target.rpartition(".")[2]])
    twin.name, twin.parent, twin.labels = name, owner, twin.labels - {"async"}
    if twin.docstring is not None:
        text = twin.docstring.value.replace("await ", "").replace("async_", "")
        style, options = twin.docstring.parser, twin.docstring.parser_options
        twin.docstring = griffe.Docstring(text, parent=twin, parser=style, parser_options=options)
    owner.members[name] = twin
