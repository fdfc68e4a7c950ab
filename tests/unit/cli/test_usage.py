"""What a usage error says of words that are given without their option."""

from __future__ import annotations

from pathlib import Path

import pytest

from transfer_queue.cli.app import app
from transfer_queue.cli.faults import run


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("up", "--file queue.yaml"),
        ("up q.yaml", "--file q.yaml"),
        ("up --backend simple q.yaml --detach", "--file q.yaml --detach"),
        ("up python job.py", "--file queue.yaml -- python job.py"),
        ("doctor q.yaml", "--file q.yaml"),
        ("status demo", "--queue demo"),
        ("top demo", "--queue demo"),
        ("plan 64 8k", "--gpus 64 --seq 8k"),
        ("bench mooncake", "--backend mooncake"),
        ("reset train evaluate", "--task evaluate"),
        ("tail train 8", "--count 8"),
        ("get train", "tq ls train"),
        ("top -n 1", "tq top --once"),
    ],
)
def test_words_without_their_option_are_told_with_it(
    capsys: pytest.CaptureFixture[str], typed: str, meant: str
) -> None:
    assert run(app, typed.split(), prog_name="tq") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"; did you mean {meant}? see: tq {typed.split()[0]} --help" in line


@pytest.mark.parametrize("typed", ["up --what", "ls a b", "plan --gpus 64", "up -f a.yaml --backend"])
def test_nothing_is_guessed_where_no_option_fits(capsys: pytest.CaptureFixture[str], typed: str) -> None:
    assert run(app, typed.split(), prog_name="tq") == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("name", [info.callback.__name__ for info in app.registered_commands if info.callback])
def test_help_of_each_command_has_examples(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run(app, [name, "-h"], prog_name="tq") == 0
    examples = capsys.readouterr().out.partition("Examples:")[2]
    assert f"  tq {name}" in examples


def test_the_version_is_an_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["--version"]) == run(app, ["version"]) == 0
    option, command = capsys.readouterr().out.splitlines()
    assert option == command != ""


def test_a_queue_is_taken_down_by_the_file_that_started_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = tmp_path / "q.yaml"
    file.write_text(
        "apiVersion: transferqueue.io/v1alpha1\nkind: TransferQueue\nmetadata: {name: train}\n"
        "spec: {backend: {simple: {}}}\n"
    )
    assert run(app, ["down", "-f", str(file)]) == 1
    assert "queue train is not running" in capsys.readouterr().err


def test_what_one_machine_cannot_run_is_told_with_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "q.yaml"
    file.write_text(
        "apiVersion: transferqueue.io/v1alpha1\nkind: TransferQueue\nmetadata: {name: a}\n"
        "spec: {backend: {simple: {}}, storage: {replicas: 0}}\n"
    )
    assert run(app, ["up", "-f", str(file)]) == 2
    assert f"error: {file}: spec.storage.replicas: 0 storage units hold no rows" in capsys.readouterr().err
