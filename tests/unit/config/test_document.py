"""Settings files that name environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from transfer_queue.config.document import load_document, validate_document
from transfer_queue.config.processes import StorageUnitConfig
from transfer_queue.config.quantity import Quantity
from transfer_queue.errors import ConfigError


def test_a_variable_of_the_environment_is_put_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAME", "q-storage-1")
    path = tmp_path / "unit.json"
    path.write_text('{"name": "$(POD_NAME)", "controller": ["$(POD_NAME).q:50060"]}')
    settings = load_document(StorageUnitConfig, path)
    assert (settings.name, settings.controller) == ("q-storage-1", ["q-storage-1.q:50060"])


def test_a_variable_that_is_not_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POD_NAME", raising=False)
    path = tmp_path / "unit.json"
    path.write_text('{"name": "$(POD_NAME)", "controller": ["c:50060"]}')
    with pytest.raises(ConfigError, match=r"unit\.json: \$\(POD_NAME\) names an environment variable that is not set"):
        load_document(StorageUnitConfig, path)


def test_a_wrong_setting_of_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "unit.json"
    path.write_text('{"name": "unit",\n "controller": ["c:1"],\n "capacity": "0"}')
    with pytest.raises(ConfigError, match=r"unit\.json: capacity: '0' is not a quantity above zero; .* \(line 3\)$"):
        load_document(StorageUnitConfig, path)


@pytest.mark.parametrize("text", ["64Gi", "0.1Gi", "1Pi", "2P", "500M", "2097152"])
def test_a_storage_unit_takes_every_quantity_that_the_resource_takes(text: str) -> None:
    settings = validate_document(StorageUnitConfig, {"controller": ["c:50060"], "capacity": text}, "unit")
    assert settings.capacity == int(Quantity(text))
