"""Who runs which queue on this machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from transfer_queue.cli.state import RunningQueue, ServerState, claim, read_running, state_root, write_running
from transfer_queue.config.running import write_note
from transfer_queue.errors import StartError


@pytest.fixture(autouse=True)
def _state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def note(folder: Path) -> RunningQueue:
    queue = RunningQueue("q", os.getpid(), "simple", "127.0.0.1:1", str(folder / "attach.yaml"))
    write_running(folder, queue)
    return queue


def test_a_queue_is_listed_from_when_it_is_noted_until_it_is_given_up() -> None:
    with claim("q") as folder:
        assert read_running() == []
        queue = note(folder)
        assert read_running() == [queue]
    assert read_running() == []


def test_a_queue_whose_keeper_was_killed_is_not_listed() -> None:
    with claim("q") as folder:
        note(folder)
        left = (folder / "queue.json").read_bytes()
    (state_root() / "q" / "queue.json").write_bytes(left)  # as after kill -9: the note is there, the lock is free
    assert read_running() == []


def test_a_name_can_be_claimed_once_at_a_time() -> None:
    with claim("q"), pytest.raises(StartError, match="tq down q"), claim("q"):
        pass
    with claim("q"), claim("other"):
        pass


def test_a_claim_removes_what_former_runs_recorded_and_refuses_files_of_others() -> None:
    recorded = ["storage-7.log", "attach.yaml", "tls/ca.crt"]
    with claim("q", recorded) as folder:
        (folder / "tls").mkdir()
        for name in (*recorded, "notes.txt", "controller.log"):
            (folder / name).write_text("old")
        note(folder)
    assert (folder / "storage-7.log").exists()
    with claim("q", ["attach.yaml"]):
        assert {path.name for path in folder.rglob("*")} == {"lock", "tls", "notes.txt", "controller.log"}
    (folder / "policy.yaml").write_text("mine")
    (folder / "tls").rmdir()
    (folder / "tls").symlink_to(folder)
    with claim("q", ["attach.yaml"]):
        pass  # the run makes no file of these names
    for name, told in (("policy.yaml", r"queue q did not make: policy.yaml; move"), ("tls/ca.crt", r"/tls is a link")):
        with pytest.raises(StartError, match=told), claim("q", [name]):
            pass
    (folder / "lock").write_text("mine")
    with pytest.raises(StartError, match="/lock belongs to another program"), claim("q"):
        pass
    assert (folder / "policy.yaml").read_text() == (folder / "lock").read_text() == "mine"


def test_a_claim_takes_over_what_a_run_of_an_earlier_build_noted() -> None:
    with claim("q") as folder:
        pass
    (folder / "lock").write_bytes(b"")
    for name in ("storage-7.log", "attach.yaml", "policy.yaml", "controller.log"):
        (folder / name).write_text("old")
    queue = RunningQueue("q", 1, "simple", "", "", [ServerState("storage-7", 1), ServerState("../q/policy.yaml", 1)])
    write_note(folder / "last.json", queue)
    with claim("q", ["attach.yaml", "storage-7.log"]):
        assert {path.name for path in folder.iterdir()} == {"lock", "policy.yaml", "controller.log"}


def test_a_state_folder_that_others_made_or_may_write_is_refused(tmp_path: Path) -> None:
    made = state_root() / "q"
    made.mkdir(parents=True)
    made.chmod(0o777)
    with pytest.raises(StartError, match=r"can be written by others \(mode 0777\).*chmod 700"), claim("q"):
        pass
    made.rmdir()
    made.symlink_to(tmp_path)
    with pytest.raises(StartError, match="is not a folder"), claim("q"):
        pass
    made.unlink()
    with claim("q") as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(StartError, match="XDG_STATE_HOME"), claim("q"):
        pass
