"""Which metrics a PromQL expression asks for."""

from __future__ import annotations

import re

__all__ = ["metric_names"]

_WORDS = {"by", "without", "on", "ignoring", "group_left", "group_right", "and", "or", "unless", "offset", "bool"}
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_NOISE = re.compile(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]')
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?!\w)(?!\s*\()")


def metric_names(expression: str) -> set[str]:
    """Names outside label matchers, ranges, grouping clauses and function calls."""
    text = _GROUPING.sub(" ", _NOISE.sub(" ", expression))
    text = re.sub(r"\b\d[\w.]*", " ", text)
    return set(_NAME.findall(text)) - _WORDS
