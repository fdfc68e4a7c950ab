"""The files of the chart that follow from the types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tq_operator.api.crd import PLURAL, custom_resource_definitions
from tq_operator.api.generate import generated_files, main
from tq_operator.runtime.settings import OperatorSettings
from transfer_queue.errors import ConfigError

CHART = Path(__file__).parents[3] / "charts" / "transferqueue"


def test_the_chart_holds_what_the_types_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_the_check_fails_on_a_difference_and_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--chart", str(tmp_path)]) == 0
    assert main(["--check", "--chart", str(tmp_path)]) == 0
    (tmp_path / "values.schema.json").write_text("{}")
    assert main(["--check", "--chart", str(tmp_path)]) == 1
    assert "values.schema.json; run `python -m tq_operator.api.generate`" in capsys.readouterr().err
    assert json.loads((tmp_path / "values.schema.json").read_text()) == {}, "a check writes nothing"


def test_the_values_of_the_chart_fit_their_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(
        yaml.safe_load((CHART / "values.yaml").read_text()), json.loads((CHART / "values.schema.json").read_text())
    )


def test_the_schema_is_structural() -> None:
    def check(node: dict[str, Any], path: str) -> None:
        assert set(node) & {"$ref", "$defs", "title", "const", "additionalItems"} == set(), path
        assert (
            "type" in node or "x-kubernetes-int-or-string" in node or "x-kubernetes-preserve-unknown-fields" in node
        ), path
        assert node.get("additionalProperties") is not False, path
        for name, child in node.get("properties", {}).items():
            check(child, f"{path}.{name}")
        for key in ("items", "additionalProperties"):
            if isinstance(node.get(key), dict):
                check(node[key], f"{path}.{key}")

    version, later = custom_resource_definitions()[PLURAL]["spec"]["versions"]
    assert later["schema"] == version["schema"]
    check(version["schema"]["openAPIV3Schema"], "")


def test_every_field_is_explained() -> None:
    version, _ = custom_resource_definitions()[PLURAL]["spec"]["versions"]

    def unexplained(node: dict[str, Any], path: str) -> list[str]:
        found = [] if node.get("description") or path.count(".") < 2 else [path]
        for name, child in node.get("properties", {}).items():
            found += unexplained(child, f"{path}.{name}")
        return found

    assert unexplained(version["schema"]["openAPIV3Schema"], "") == []


def test_generated_text_is_the_same_each_time() -> None:
    assert generated_files() == generated_files()


def test_the_operator_names_the_variables_it_misses() -> None:
    with pytest.raises(ConfigError, match="set TQ_IMAGE_SERVER and TQ_IMAGE_MOONCAKE to the images"):
        OperatorSettings.from_environment({})
    with pytest.raises(ConfigError, match='TQ_DEFAULT_TLS: "on" is neither operator nor off'):
        OperatorSettings.from_environment({"TQ_IMAGE_SERVER": "s", "TQ_IMAGE_MOONCAKE": "m", "TQ_DEFAULT_TLS": "on"})
    with pytest.raises(ConfigError, match='TQ_RESYNC_SECONDS: "soon" is not a number'):
        OperatorSettings.from_environment(
            {"TQ_IMAGE_SERVER": "s", "TQ_IMAGE_MOONCAKE": "m", "TQ_RESYNC_SECONDS": "soon"}
        )


def test_the_operator_reads_its_settings() -> None:
    settings = OperatorSettings.from_environment(
        {"TQ_IMAGE_SERVER": "s", "TQ_IMAGE_MOONCAKE": "m", "TQ_WATCH_NAMESPACES": "a, b", "TQ_RESYNC_SECONDS": "7"}
    )
    assert (settings.images.server, settings.images.mooncake) == ("s", "m")
    assert (settings.namespaces, settings.resync) == (("a", "b"), 7.0)
