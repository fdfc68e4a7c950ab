"""One docstring for a blocking call and its ``async_`` twin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["share_docstrings"]

_AWAITED = re.compile(r"await (\w+\.)async_")
_NAMED = re.compile(r"(?<=`)async_(?=\w+`)")


def share_docstrings(calls: Mapping[str, Any]) -> None:
    """Where ``f`` or ``async_f`` only refers to the other, give it the docstring of the other, with an example that
    fits. Editors, which do not run this, show the reference."""
    for name, call in calls.items():
        twin = calls.get(f"async_{name}")
        if twin is None:
            continue
        if call.__doc__ == f"See ``async_{name}``.":
            call.__doc__ = _NAMED.sub("", _AWAITED.sub(r"\1", twin.__doc__))
        elif twin.__doc__ == f"See ``{name}``.":
            twin.__doc__ = re.sub(rf"(\w+\.)(?={name}\()", r"await \1async_", call.__doc__)
