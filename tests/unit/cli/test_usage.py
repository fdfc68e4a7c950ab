"""What a usage error says of words that are given without their option."""

from __future__ import annotations

from pathlib import Path

import pytest

from transfer_queue.cli.app import app
from transfer_queue.cli.data import parse_fields
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


RESOURCE = "apiVersion: transferqueue.io/v1alpha1\nkind: TransferQueue\nmetadata: {name: a}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["put", "", "k", "x=1"],
        ["put", "train", "", "x=1"],
        ["get", "train", "a", ""],
        ["get", "train", "a", "-F", ""],
        ["ls", ""],
        ["clear", "train", ""],
        ["tail", ""],
        ["reset", "train", "--task", ""],
        ["status", "--queue", ""],
        ["checkpoint", "load", ""],
    ],
)
def test_an_empty_word_is_a_wrong_argument(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run(app, words, prog_name="tq") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert " is empty; is a variable of the shell not set?" in line


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (["x=1", "x=2"], "field 'x' is given twice"),
        (["x=1e400"], "x: 1e400 is beyond the range of a float; write inf"),
        (["x=[1.0, -1e400]"], "x: -1e400 is beyond"),
        (['x={"a": 1, "a": 2}'], "x: name 'a' is given twice"),
    ],
)
def test_a_value_that_would_be_lost_is_refused(
    capsys: pytest.CaptureFixture[str], fields: list[str], text: str
) -> None:
    assert run(app, ["put", "train", "k", *fields]) == 2
    assert text in capsys.readouterr().err


def test_infinity_is_written_as_such() -> None:
    found = parse_fields(["x=inf", "y=-inf", "z=nan", "w=[Infinity]"])
    assert str(found) == "{'x': inf, 'y': -inf, 'z': nan, 'w': [inf]}"


def test_a_command_is_missing_after_the_dashes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "q.yaml").write_text(RESOURCE + "spec: {backend: {simple: {}}}\n")
    assert run(app, ["up", "-f", str(tmp_path / "q.yaml"), "--"], prog_name="tq") == 2
    assert "a command is missing after --; see: tq up --help" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["up", "doctor"])
def test_a_sampler_that_cannot_be_made_is_told_with_the_document(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = tmp_path / "q.yaml"
    sampler = "sampler:\n      name: GRPOGroupNSampler\n      args: {n_samples_per_prompt: 4, group: 2}\n"
    file.write_text(f"{RESOURCE}spec:\n  backend: {{simple: {{}}}}\n  controller:\n    {sampler}")
    assert run(app, [command, "-f", str(file)]) != 0
    told = capsys.readouterr()
    call = "GRPOGroupNSampler(n_samples_per_prompt=4, group=2)"
    assert f"{file}: spec.controller.sampler.args: {call}: " in told.out + told.err
    assert "(line 9)" in told.out + told.err
    assert "starting" not in told.err
