"""What is said of the variables of the environment."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

from transfer_queue import lifecycle
from transfer_queue.cli.app import app
from transfer_queue.cli.doctor_queue import settings
from transfer_queue.cli.faults import run
from transfer_queue.cli.findings import Subject
from transfer_queue.config.attach import attach_from_environment
from transfer_queue.config.variables import misspelt
from transfer_queue.errors import ConfigError, NotInitializedError

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("TQ_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_a_misspelt_variable_is_told_once_and_by_each_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TQ_LAYUOT", "dense")
    monkeypatch.setattr(lifecycle, "_state", lifecycle._State())
    lifecycle._warn_of_variables.cache_clear()
    with warnings.catch_warnings(record=True) as caught, suppress(NotInitializedError):
        warnings.simplefilter("always")
        lifecycle._warn_of_variables()
        lifecycle.current_client()
    (warning,) = caught
    assert "TQ_LAYUOT is not read; did you mean TQ_LAYOUT?" in str(warning.message)
    assert run(app, ["status"]) == 0
    assert "TQ_LAYUOT is not read; did you mean TQ_LAYOUT?" in capsys.readouterr().err
    states = [finding.state for finding in settings(Subject(None, tmp_path, tmp_path, None, None))]
    assert states == ["warn", "ok"]


def test_the_first_words_of_a_variable_are_told_with_the_rest() -> None:
    told = misspelt({"TQ_CONFIG": "/x.yaml", "TQ_QUEUE": "a", "TQ_": "", "TQ_CONF": "", "TQ_PORT": "1"})
    assert told == [
        "environment variable TQ_CONFIG is not read; did you mean TQ_CONFIG_FILE?",
        "environment variable TQ_QUEUE is not read; did you mean TQ_QUEUE_NAME or TQ_QUEUE_UID?",
    ]


@pytest.mark.parametrize(("name", "value"), [("TQ_LOGGING_LEVEL", "verbose"), ("TQ_EVENT_LOOP", "uv")])
def test_a_wrong_value_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"environment variable {name}: '{value}' is not .*; use "):
        lifecycle.init()
    assert run(app, ["status"]) == 2
    assert f"error: environment variable {name}: '{value}' is not" in capsys.readouterr().err


def test_no_variable_of_this_repository_looks_misspelt() -> None:
    files = [path for folder in ("transfer_queue", "docs", "bench", "operator") for path in (ROOT / folder).rglob("*")]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".md", ".yaml")]
    names = {name for text in texts for name in re.findall(r"\bTQ_[A-Z_]*[A-Z]\b", text)}
    assert len(names) > 40
    assert misspelt(dict.fromkeys(names, "")) == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TQ_CONFIG_FILE", "{queue}", "this is a TransferQueue resource: start it by tq up -f {queue}; TQ_CONFIG_FILE"),
        ("TQ_CONFIG_FILE", "{folder}", "{folder}: cannot be read: Is a directory"),
        ("TQ_CONTROLLER_ADDRESS", "127.0.0.1", "'127.0.0.1' is not an address; write host:port"),
        ("TQ_CONTROLLER_ADDRESS", "http://127.0.0.1:1", "'http://127.0.0.1:1' is not an address: write host:port"),
        ("TQ_TOKEN_FILE", "{folder}/nope", "{folder}/nope: cannot be read: No such file"),
    ],
)
def test_a_wrong_name_of_a_queue_is_told_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str, said: str
) -> None:
    queue = tmp_path / "queue.yaml"
    queue.write_text("apiVersion: transferqueue.io/v1alpha1\nkind: TransferQueue\nmetadata: {name: a}\nspec: {}\n")
    monkeypatch.setenv("TQ_CONTROLLER_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv(name, value.format(queue=queue, folder=tmp_path))
    with pytest.raises(ConfigError) as refused:
        attach_from_environment()
    assert str(refused.value).startswith(f"environment variable {name}: ")
    assert said.format(queue=queue, folder=tmp_path) in str(refused.value)
