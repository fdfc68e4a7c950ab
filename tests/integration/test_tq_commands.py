"""``tq`` on a running queue: what each command prints, in every form, and its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.queue_command import start_tq
from tests.integration.stack import ROOT, Stack
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(600)  # each command may import torch, on whatever machine


class Command:
    """``tq`` in its own process, with the controller's address in the environment."""

    def __init__(self, address: str) -> None:
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT), "TQ_CONTROLLER_ADDRESS": address}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return start_tq(self.environ, *arguments)

    def __call__(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        """Standard output and error."""
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=250)
        assert process.returncode == code, f"{arguments}: {process.returncode}\n{out}\n{err}"
        assert "Traceback" not in err
        return out, err

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--output", "json")[0])


@pytest.fixture
def command(queue: Stack) -> Command:
    return Command(queue.address)


@pytest.fixture
def rows(queue: Stack, partition: str) -> Iterator[str]:
    """Two rows with a tensor of three numbers each; the first one has a reward too."""
    tokens = TensorDict({"tokens": torch.arange(6).reshape(2, 3)}, [2])
    tq.kv_batch_put(keys=["a", "b"], partition_id=partition, fields=tokens, tags=[{"len": 3}, {}])
    tq.kv_batch_put(keys=["a"], partition_id=partition, fields=TensorDict({"reward": torch.tensor([0.5])}, [1]))
    yield partition
    tq.kv_clear(list(tq.kv_list(partition).get(partition, {})) or ["none"], partition)


def test_ls_lists_partitions_and_keys_in_every_form(command: Command, rows: str) -> None:
    found = next(item for item in command.json("ls") if item["name"] == rows)
    assert (found["rows"], found["keys"], found["fields"]) == (2, 2, {"tokens": 2, "reward": 1})
    assert command.json("ls", rows) == {"a": {"len": 3}, "b": {}}
    assert yaml.safe_load(command("ls", rows, "-o", "yaml")[0]) == {"a": {"len": 3}, "b": {}}
    lines = command("ls", rows)[0].splitlines()
    assert [line.split() for line in lines] == [["KEY", "TAG"], ["a", '{"len":', "3}"], ["b"]]


def test_get_shows_rows_that_put_wrote(command: Command, rows: str) -> None:
    command("put", rows, "c", "tokens=[7, 8, 9]", 'text="hello"', "ok=true", "--tag", '{"len": 3}')
    assert command.json("get", rows, "c") == {"c": {"tokens": [7, 8, 9], "text": "hello", "ok": True}}
    assert tq.kv_list(rows)[rows]["c"] == {"len": 3}
    assert command("get", rows, "c", "-F", "text")[0].splitlines()[1].split() == ["c", "text", "'hello'"]
    table = command("get", rows, "a", "c", "--field", "tokens")[0]
    assert [line.split()[:2] for line in table.splitlines()] == [["KEY", "FIELD"], ["a", "tokens"], ["c", "tokens"]]
    assert "int64 [3]: 0, 1, 2" in table


def test_clear_forgets_the_named_keys_or_everything_and_says_what_it_did(command: Command, rows: str) -> None:
    _, said = command("clear", rows, "a", "unknown")
    assert f"cleared 1 row of partition '{rows}'; not found: 'unknown'" in said
    assert list(tq.kv_list(rows)[rows]) == ["b"]
    _, error = command("clear", rows, "unknown", code=1)
    assert "nothing to clear" in error
    _, error = command("clear", f"{rows}x", "a", code=1)
    assert f"partition '{rows}x' not found; did you mean '{rows}'?" in error
    _, error = command("clear", rows, "--all", code=2)
    assert "--yes" in error
    _, said = command("clear", rows, "--all", "--yes")
    assert "cleared 1 row " in said
    assert tq.kv_list(rows) in ({}, {rows: {}})


def test_reset_drops_named_or_idle_tasks_and_says_how_many(command: Command, rows: str) -> None:
    client = tq.get_client()
    for task in ("one", "two"):
        assert client.get_meta(["tokens"], 2, rows, task_name=task).size == 2
    _, said = command("reset", rows, "--idle", "3600")
    assert f"partition '{rows}' has 0 tasks less" in said
    _, said = command("reset", rows, "--task", "one")
    assert f"partition '{rows}' has 1 task less" in said
    assert client.get_meta(["tokens"], 2, rows, task_name="one").size == 2
    client.reset_consumption(rows, idle=1e-9)
    assert client.get_meta(["tokens"], 2, rows, task_name="two").size == 2
    _, error = command("reset", rows, code=2)
    assert "--yes" in error
    _, error = command("reset", rows, "--task", "twoo", code=1)
    assert f"no task 'twoo' has taken rows of partition '{rows}'; did you mean 'two'?" in error


def test_a_partition_or_queue_that_does_not_exist_is_no_empty_answer(
    command: Command, rows: str, tmp_path: Path
) -> None:
    there_is_none = f"there is no partition '{rows}s'; did you mean '{rows}'?"
    assert there_is_none in command("why", f"{rows}s")[0]
    _, said = command("trace", str(tmp_path / "a.json"), "--seconds", "0", "--partition", f"{rows}s")
    assert there_is_none in said
    _, error = command("doctor", "--queue", "nope", code=2)
    assert "queue nope is not running here" in error


def test_the_shell_completes_partitions_of_the_running_queue(command: Command, rows: str) -> None:
    start = rows[:-2]
    command.environ |= {"_TQ_COMPLETE": "complete_bash", "COMP_WORDS": f"tq ls {start}", "COMP_CWORD": "2"}
    script = "from transfer_queue.cli.app import app; app(prog_name='tq')"
    done = subprocess.run(
        [sys.executable, "-c", script], env=command.environ, capture_output=True, text=True, timeout=250, check=False
    )
    assert rows in done.stdout.split(), done.stderr


HOSTILE = "train\x1b[2J\x9b31m\u202e\r\nerror: [red]forged"


def test_names_of_users_reach_no_terminal_as_control_characters(command: Command, rows: str) -> None:
    tags = {"note": HOSTILE}
    tq.kv_put(key=HOSTILE, partition_id=HOSTILE, fields={"text": "x\x1b[2J"}, tag=tags)
    try:
        said = [command("ls"), command("ls", HOSTILE), command("top", "--once"), command("get", HOSTILE, HOSTILE)]
        said += [command("ls", HOSTILE, "-o", "yaml"), command("ls", HOSTILE, "-o", "json")]
        said += [
            command("tail", HOSTILE, "--from-start", "--count", "1"),
            command("clear", HOSTILE, "x\x1b[2J", code=1),
        ]
        said += [command("clear", HOSTILE, "--all", "--yes"), command("clear", HOSTILE, "--all", "--yes", code=1)]
    finally:
        tq.kv_clear([HOSTILE], HOSTILE)
    for text in (line for pair in said for output in pair for line in output.split("\n")):
        assert text.isprintable(), repr(text)
        assert not text.startswith("error: [red]forged")
    assert r"train\x1b[2J\x9b31m\u202e\r\nerror: [red]forged" in said[0][0]
    assert yaml.safe_load(said[4][0]) == json.loads(said[5][0]) == {HOSTILE: tags}


def test_tail_shows_keys_as_they_come(command: Command, rows: str) -> None:
    with command.start("tail", rows, "--count", "2", "--interval", "0.1", "-o", "json") as process:
        assert process.stderr is not None
        assert process.stdout is not None
        process.stderr.readline()  # it looks from now on
        tq.kv_put(key="new", partition_id=rows, tag={"n": 1})
        assert json.loads(process.stdout.readline()) == {"key": "new", "tag": {"n": 1}}
        tq.kv_put(key="newer", partition_id=rows, tag={"n": 2})
        assert json.loads(process.stdout.readline())["key"] == "newer"
        assert process.wait(60) == 0


def test_tail_that_sees_too_little_fails(command: Command, partition: str) -> None:
    _, error = command("tail", partition, "--timeout", "0.2", "--interval", "0.1", code=1)
    assert "0 keys came into partition" in error


def test_top_once_tells_who_waits_and_what_lacks(command: Command, rows: str) -> None:
    command.environ.pop("COLUMNS", None)  # readline sets it in the workers of pytest-xdist
    client = tq.get_client()
    waiting = threading.Thread(
        target=lambda: client.get_meta(["reward"], 2, rows, task_name="trainer", timeout=250), daemon=True
    )
    waiting.start()
    wait_until(lambda: command.json("top", "--once")["waiters"], "the trainer waits")
    picture = command.json("top", "--once")
    waiter = next(item for item in picture["waiters"] if item["partition"] == rows)
    assert (waiter["task"], waiter["rows"], waiter["kind"]) == ("trainer", 2, "fetch")
    assert waiter["lacks"].startswith("1 are ready, 'reward' is missing on 1 of 2; 'reward' was last written ")
    assert {unit["name"] for unit in picture["units"]} == {"u0", "u1"}
    table = command("top")[0]  # to a pipe it prints one frame and ends
    for text in (rows, "1/2", "trainer", "'reward' is missing on 1 of 2", "of 128.0 MiB"):
        assert text in table
    tq.kv_batch_put(keys=["b"], partition_id=rows, fields=TensorDict({"reward": torch.tensor([1.0])}, [1]))
    waiting.join(60)
    assert not waiting.is_alive()


def test_why_names_the_missing_field_and_who_wrote_it_last(command: Command, rows: str) -> None:
    client = tq.get_client()
    waiting = threading.Thread(
        target=lambda: client.get_meta(["tokens", "reward", "value"], 2, rows, task_name="trainer", timeout=60)
    )
    waiting.start()
    (sentence,) = wait_until(
        lambda: [line for line in command.json("why", rows) if "has waited" in line], "the fetch is parked", 60
    )
    assert sentence.startswith("task 'trainer' has waited ")
    assert (
        f"for 2 rows of '{rows}': 0 are ready, 'reward' is missing on 1 of 2, no row of partition '{rows}' has field "
        "'value'" in sentence
    )
    assert re.search(
        # The task for which this client took rows last, in the tests before.
        rf"'reward' was last written \d+ s ago in '{rows}' by \S+( \(task '\w+'\))?, which is connected; no client",
        sentence,
    )
    assert sentence.endswith("no client has written 'value' since this controller started")
    rest = TensorDict({"reward": torch.ones(2), "value": torch.ones(2)}, [2])
    tq.kv_batch_put(keys=["a", "b"], partition_id=rows, fields=rest)
    waiting.join(60)
    assert command.json("why", rows) == [f"no request is waiting for partition '{rows}'"]


def test_trace_shows_a_step_across_producers_and_consumers(
    command: Command, queue: Stack, partition: str, tmp_path: Path
) -> None:
    file = tmp_path / "step.json"
    client = tq.get_client()
    with command.start("trace", "--perfetto", str(file), "--seconds", "100", "--partition", partition) as process:
        assert process.stderr is not None
        assert "recording" in process.stderr.readline()
        trainer = threading.Thread(
            target=lambda: client.get_meta(["reward"], 2, partition, task_name="trainer", timeout=250), daemon=True
        )
        trainer.start()
        wait_until(lambda: queue.controller.metric("tq_controller_waiting") >= 1, "the trainer waits")
        put = TensorDict({"reward": torch.ones(2)}, [2])
        tq.kv_batch_put(keys=["a", "b"], partition_id=partition, fields=put)
        trainer.join(60)
        assert not trainer.is_alive()
        tq.kv_put(key="x", partition_id=f"{partition}-other", tag={"n": 1})
        tq.kv_batch_get(["a", "b"], partition, ["reward"])
        tq.kv_clear(["a", "b"], partition)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    events = json.loads(file.read_text())["traceEvents"]
    slices = {event["cat"]: event for event in events if event["ph"] == "X"}
    assert {name: event["name"] for name, event in slices.items()} == {
        "put": "put reward",
        "fetch": "trainer: reward",
        "clear": "clear rows",
        "get": "get reward",
        "wait": "wait",
    }
    assert slices["wait"]["args"]["ended by"].endswith(": reward")
    assert slices["fetch"]["args"] == {"partition": partition, "rows": 2}
    start, end = (event for event in events if event.get("cat") == "rows")
    assert (start["ph"], start["tid"], start["ts"]) == ("s", slices["put"]["tid"], slices["put"]["ts"])
    assert (end["ph"], end["tid"], end["id"]) == ("f", slices["fetch"]["tid"], start["id"])
    assert slices["put"]["ts"] <= end["ts"] <= slices["fetch"]["ts"] + slices["fetch"]["dur"]
    names = [event["args"]["name"] for event in events if event.get("name") == "thread_name"]
    assert all(name.startswith("TransferQueueClient_") for name in names)


def test_only_one_trace_is_recorded_at_a_time_and_it_ends_with_who_began_it(command: Command, tmp_path: Path) -> None:
    first = command.start("trace", str(tmp_path / "a.json"), "--seconds", "100")
    with first:
        assert first.stderr is not None
        assert "recording" in first.stderr.readline()
        _, error = command("trace", str(tmp_path / "b.json"), "--seconds", "0", code=1)
        assert "somebody else is tracing" in error
        first.kill()
        first.wait(60)
    wait_until(lambda: free_to_trace(command, tmp_path), "the trace of a dead process has ended")


def free_to_trace(command: Command, folder: Path) -> bool:
    with command.start("trace", str(folder / "c.json"), "--seconds", "0") as process:
        process.communicate(timeout=250)
    return process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("ls", "nowhere"), 1, "partition 'nowhere' not found; tq ls shows the partitions"),
        (("get", "nowhere", "a"), 1, "keys ['a'] not found"),
        (("get", "nowhere", "a,b"), 1, "separate keys by spaces: a b"),
        (("put", "p", "a"), 2, "nothing to put"),
        (("put", "p", "a", "text=hello"), 2, "text needs quotes of its own: text='\"hello\"'"),
        (("put", "p", "a", "=1"), 2, "write NAME=JSON"),
        (("clear", "p"), 2, "name the keys to clear"),
        (("ls", "--controller", "nonsense"), 2, "write host:port"),
        (("ls", "--controller", "127.0.0.1:1"), 1, "cannot reach the controller at 127.0.0.1:1"),
        (("ls", "--queue", "other"), 2, "queue other is not running here"),
        (("plan", "--gpus", "8", "--seq", "long"), 2, "write for example 4096 or 32k"),
        (("ls", "--output", "xml"), 2, "'xml' is not one of 'table', 'json', 'yaml'; see: tq ls --help"),
        (("get", "p"), 2, "see: tq get --help"),
        (("down", "a", "--queue", "b"), 2, "two queues are named"),
    ],
)
def test_a_fault_is_one_line_and_an_exit_code(
    command: Command, arguments: tuple[str, ...], code: int, text: str
) -> None:
    _, error = command(*arguments, code=code)
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert text in error


def test_without_any_queue_the_error_says_how_to_name_one(command: Command, tmp_path: Any) -> None:
    del command.environ["TQ_CONTROLLER_ADDRESS"]
    command.environ["XDG_STATE_HOME"] = str(tmp_path)
    _, error = command("top", code=2)
    assert "start one with tq up, name one with --controller host:port" in error


def test_commands_that_only_look_do_not_import_torch(queue: Stack) -> None:
    script = (
        "import sys; sys.argv = ['tq', 'ls']; from transfer_queue.cli.app import app\n"
        "try: app()\n"
        "except SystemExit as done: assert not done.code\n"
        "assert 'torch' not in sys.modules"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TQ_CONTROLLER_ADDRESS": queue.address}
    subprocess.run([sys.executable, "-c", script], env=environ, check=True, timeout=60, capture_output=True)
