"""Writes the files of the chart that follow from the types: ``python -m tq_operator.api.generate [--check]``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from tq_operator.api.crd import custom_resource_definitions
from tq_operator.api.schema import structural
from tq_operator.api.values import Values

__all__ = ["generated_files", "main"]

_CHART = Path(__file__).resolve().parents[3] / "charts" / "transferqueue"
_NOTE = "# Generated from the types by `python -m tq_operator.api.generate`; do not edit.\n"


class _Dumper(yaml.SafeDumper):
    """Writes equal objects out each time: YAML aliases are hard to read, and kubectl's users copy from here."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def generated_files() -> dict[Path, str]:
    """Path in the chart -> content."""
    definitions = {
        Path("files/crds") / f"{plural}.yaml": _NOTE + yaml.dump(definition, Dumper=_Dumper, sort_keys=False, width=120)
        for plural, definition in custom_resource_definitions().items()
    }
    return {
        **definitions,
        Path("values.schema.json"): json.dumps(_values_schema(), indent=2) + "\n",
        # Templates cannot read values.yaml itself.
        Path("files/defaults.yaml"): _NOTE + (_CHART / "values.yaml").read_text(encoding="utf-8"),
    }


def _values_schema() -> dict[str, Any]:
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_closed(structural(Values))}


def _closed(node: dict[str, Any]) -> dict[str, Any]:
    """A structural schema as plain JSON schema: unknown fields refused, rules that only Kubernetes knows left out."""
    # No value is required: the reused values of an older release may lack it.
    kept = {key: value for key, value in node.items() if not key.startswith("x-kubernetes") and key != "required"}
    for rule in node.get("x-kubernetes-validations", []):
        low, high = rule["rule"].replace("self >= ", "").replace("self <= ", "").split(" && ")
        kept |= {"minimum": int(low), "maximum": int(high)}
    if "properties" in node:
        kept["properties"] = {name: _closed(child) for name, child in node["properties"].items()}
        kept["additionalProperties"] = False
    if "items" in node:
        kept["items"] = _closed(node["items"])
    return kept


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tq_operator.api.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    parser.add_argument("--chart", type=Path, default=_CHART, help="the chart's directory")
    options = parser.parse_args(arguments)
    stale = []
    for relative, content in generated_files().items():
        path = options.chart / relative
        if path.exists() and path.read_text(encoding="utf-8") == content:
            continue
        stale.append(str(path))
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    if options.check and stale:
        print(f"out of date: {', '.join(stale)}; run `python -m tq_operator.api.generate`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
