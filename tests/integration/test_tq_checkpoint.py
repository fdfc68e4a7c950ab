"""``tq checkpoint``: a queue saved, shown, and loaded into another one by commands alone."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensordict import TensorDict
from typer.testing import CliRunner, Result

import transfer_queue as tq
from tests.integration.stack import Stack, running_stack
from transfer_queue.checkpoint.series import Series, newest
from transfer_queue.cli.app import app


def run(*arguments: str, code: int = 0) -> Result:
    """``tq checkpoint`` in this process: it takes what its own process would take seconds to import."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        found = CliRunner().invoke(app, ["checkpoint", *arguments])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert found.exit_code == code, found.output
    return found


@pytest.fixture(scope="module")
def stacks() -> Iterator[tuple[Stack, Stack]]:
    """A queue with rows, and an empty one of another size."""
    with running_stack(units=1, capacity="16Mi") as full, running_stack(units=2, capacity="16Mi") as empty:
        client = tq.TransferQueueClient("producer", full.address)
        rows = TensorDict({"x": torch.arange(6).reshape(2, 3)}, [2])
        client.run(client.kv.put, ["a", "b"], "train", rows, [{"n": 1}, {}], None)
        client.run(client.kv.put_one, "c", "tags", None, {"done": True}, None)
        client.get_meta(["x"], 1, "train", task_name="actor")
        client.close()
        yield full, empty


@pytest.fixture(scope="module")
def saved(stacks: tuple[Stack, Stack], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "queue"
    run("save", str(folder), "--controller", stacks[0].address, "--metadata", '{"step": 7}')
    return folder


def test_a_queue_is_saved_and_loaded_into_another_one(stacks: tuple[Stack, Stack], saved: Path) -> None:
    target = ("--controller", stacks[1].address)
    document = json.loads(run("load", str(saved), *target, "-o", "json").stdout)
    assert document.pop("bytes") == document.pop("written") > 48
    assert document == {
        "path": str(saved),
        "partitions": 2,
        "rows": 3,
        "storage_saved": True,
        "metadata": {"step": 7},
    }
    client = tq.TransferQueueClient("reader", stacks[1].address)
    assert client.kv_list() == {"train": {"a": {"n": 1}, "b": {}}, "tags": {"c": {"done": True}}}
    assert [row.tolist() for row in client.run(client.kv.get, ["b", "a"], "train", "x")["x"].unbind()] == [
        [3, 4, 5],
        [0, 1, 2],
    ]
    again = run("load", str(saved), *target, code=1)
    assert "the queue is not empty" in again.stderr
    assert again.stdout == ""
    for partition in client.get_partition_list():
        client.clear_partition(partition)
    client.close()
    assert "loaded 3 rows in 2 partitions" in run("load", str(saved), *target).stdout


def test_a_checkpoint_is_shown_without_a_queue(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_CONTROLLER_ADDRESS", raising=False)
    document: dict[str, Any] = json.loads(run("show", str(saved), "--verify", "-o", "json").stdout)
    assert yaml.safe_load(run("show", str(saved), "--verify", "-o", "yaml").stdout) == document
    assert (document["rows"], document["metadata"], document["verified"]) == (3, {"step": 7}, True)
    train, tags = document["contents"]
    assert train.pop("bytes") >= 48
    assert train == {"name": "train", "rows": 2, "keys": 2, "fields": ["x"], "tasks": ["actor"]}
    assert (tags["name"], tags["rows"], tags["bytes"]) == ("tags", 1, 0)
    table = run("show", str(saved), "--verify").stdout
    assert "is sound and holds 3 rows in 2 partitions" in table
    assert '{"step": 7}' in table
    assert ["train", "2", "2"] in [line.split()[:3] for line in table.splitlines()]


def test_a_folder_that_holds_no_sound_checkpoint_is_named_with_the_cause(saved: Path, tmp_path: Path) -> None:
    missing = run("show", str(tmp_path / "nowhere"), code=1)
    assert f"checkpoint not found: there is no directory {tmp_path / 'nowhere'}" in missing.stderr
    assert "metadata.json" in run("show", str(tmp_path), code=1).stderr

    damaged = tmp_path / "damaged"
    shutil.copytree(saved, damaged)
    blocks = next(damaged.glob("data-*/blocks-00000"))
    content = bytearray(blocks.read_bytes())
    content[len(content) // 2] ^= 1
    blocks.write_bytes(content)
    run("show", str(damaged))
    assert f"{blocks} is damaged" in run("show", str(damaged), "--verify", code=1).stderr

    (damaged / "metadata.json").write_text('{"name": "a data set"}')
    assert "not that of a checkpoint" in run("show", str(damaged), code=1).stderr


def test_a_folder_of_something_else_is_never_overwritten(stacks: tuple[Stack, Stack], tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"name": "a data set"}')
    save = ("save", str(tmp_path), "--controller", stacks[0].address)
    assert "does not belong to a checkpoint" in run(*save, code=1).stderr
    assert (tmp_path / "metadata.json").read_text() == '{"name": "a data set"}'
    (tmp_path / "metadata.json").write_text("step 1\nstep 2\n")
    assert "does not belong to a checkpoint" in run(*save, code=1).stderr
    (tmp_path / "metadata.json").unlink()
    for name in ("data-train", "data-20260101", ".new-20260101"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "blocks-00000").write_bytes(b"of the user")
    run(*save)
    first = json.loads((tmp_path / "metadata.json").read_text())["data"]
    (tmp_path / first / "notes.txt").write_text("of the user")
    assert "of them new" in run(*save).stdout
    (tmp_path / first / "blocks-00000").unlink()  # the second has no other: the third writes all
    run(*save)
    assert [path.name for path in (tmp_path / first).iterdir()] == [
        "notes.txt"
    ]  # all that was the former save's is gone
    for name in ("data-train", "data-20260101", ".new-20260101"):
        assert (tmp_path / name / "blocks-00000").read_bytes() == b"of the user"
    assert "holds 3 rows" in run("show", str(tmp_path)).stdout


@pytest.mark.parametrize("text", ["[1]", "step=7"])
def test_metadata_that_is_no_object_is_refused(stacks: tuple[Stack, Stack], tmp_path: Path, text: str) -> None:
    wrong = run("save", str(tmp_path / "x"), "--controller", stacks[0].address, "--metadata", text, code=2)
    assert "--metadata" in wrong.stderr
    assert not (tmp_path / "x").exists()


def test_a_series_keeps_the_newest_whatever_the_clock_and_killed_saves_do(saved: Path, tmp_path: Path) -> None:
    series = Series(str(tmp_path), "queue")
    for name in ("99999999T999999Z", "99991231T235959Z"):
        (tmp_path / name).mkdir()
    assert series.names(complete=False) == []
    moment = datetime(2026, 11, 29, 20, 30, tzinfo=timezone.utc)
    for second in (0, 1, 3, 5):
        name = Path(str(series.begin(moment + timedelta(seconds=second)))).name
        if second == 5:
            series.prune(1)  # while the next save is under way
        shutil.copytree(saved, tmp_path / name, dirs_exist_ok=True)
        if second in (1, 5):
            (tmp_path / name / "metadata.json").unlink()  # it was killed
    assert series.names() == ["20261129T203003Z"]
    assert series.names(complete=False) == ["20261129T203003Z", "20261129T203005Z"]
    name = Path(str(series.begin(moment - timedelta(hours=1)))).name
    assert name == "20261129T203006Z"
    shutil.copytree(saved, tmp_path / name, dirs_exist_ok=True)
    (tmp_path / "20261129T203005Z" / "mine").write_text("")
    others = ["20250101T000000Z", "20250101T000001Z"]
    shutil.copytree(saved, tmp_path / others[0])  # by hand
    shutil.copytree(saved, str(Series(str(tmp_path), "other").member(others[1])))
    (tmp_path / others[1] / ".transferqueue-series").write_text("other")
    series.prune(1)
    assert str(newest(str(tmp_path))) == str(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *others,
        "20261129T203005Z",
        name,
        "99991231T235959Z",
        "99999999T999999Z",
    ]
    assert [path.name for path in (tmp_path / "20261129T203005Z").iterdir()] == ["mine"]
    assert f"{name} holds 3 rows" in run("show", str(tmp_path)).stdout
    refused = run("save", str(tmp_path / name), "--every", "1", "--controller", "127.0.0.1:1", code=1)
    assert "is one checkpoint; save at intervals to another place" in refused.stderr
