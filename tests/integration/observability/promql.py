"""Which metrics a PromQL expression asks for, and all dashboards and alerts of the chart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

__all__ = ["CHART_FILES", "asked_metrics", "metric_names"]

CHART_FILES = Path(__file__).parents[3] / "charts" / "transferqueue" / "files"

_WORDS = {"by", "without", "on", "ignoring", "group_left", "group_right", "and", "or", "unless", "offset", "bool"}
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_NOISE = re.compile(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]')
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?!\w)(?!\s*\()")


def metric_names(expression: str) -> set[str]:
    """Names outside label matchers, ranges, grouping clauses and function calls."""
    text = _GROUPING.sub(" ", _NOISE.sub(" ", expression))
    text = re.sub(r"\b\d[\w.]*", " ", text)
    return set(_NAME.findall(text)) - _WORDS


def asked_metrics() -> set[tuple[str, str]]:
    """(where, metric) of every panel, variable and alert of the chart."""
    return {(where, name) for where, expression in _queries() for name in metric_names(expression)}


def _queries() -> Iterator[tuple[str, str]]:
    """(where, expression) of every panel, variable and alert."""
    for file in sorted((CHART_FILES / "dashboards").glob("*.json")):
        board = json.loads(file.read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield f"{file.name}: {panel['title']}", target["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                yield (
                    f"{file.name}: ${variable['name']}",
                    re.sub(r"label_values\((\w+), \w+\)", r"\1", variable["query"]),
                )
    for group in yaml.safe_load((CHART_FILES / "alerts" / "transferqueue.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
