"""``tq up`` with real processes: what it gives a command, and what it says and leaves when something is wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests import preloaded
from tests.integration.queue_command import QueueCommand
from tests.waiting import wait_until
from transfer_queue.config.attach import AttachConfig
from transfer_queue.config.document import load_document
from transfer_queue.config.resource import load
from transfer_queue.control.directory import shard_of
from transfer_queue.errors import ConfigError, ConnectionLostError, JournalWriteError
from transfer_queue.launch.local import SHARED_MEMORY

PUT_AND_GET = """
import torch, transfer_queue as tq
tq.init()
tq.kv_put(key="a", partition_id="p", fields={"x": torch.arange(3), "note": "hello"})
row = tq.kv_batch_get("a", "p")
print(row["x"][0].tolist(), list(row["note"]))
tq.close()
raise SystemExit(7)
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[dict[str, Any]], QueueCommand]]:
    made: list[QueueCommand] = []

    def make(backend: dict[str, Any]) -> QueueCommand:
        made.append(QueueCommand(tmp_path, backend))
        return made[-1]

    yield make
    for queue in made:
        left = queue.processes()
        for process in left:
            process.kill()
        assert not left, f"left running: {left}"
        assert unrecorded(queue) == set()


def unrecorded(queue: QueueCommand) -> set[str]:
    """Files in the folder of a queue that its record does not list; journal and arenas have headers of their own."""
    folder = queue.state / "transferqueue" / "test"
    recorded = (folder / "lock").read_text().splitlines() if (folder / "lock").exists() else []
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    others = {path for path in found if path.parts[0] not in ("identity", "journal", "arenas", "lock")}
    return {str(path) for path in others} - {*recorded}


@pytest.fixture
def simple(make: Callable[[dict[str, Any]], QueueCommand]) -> QueueCommand:
    return make({"simple": {}})


@pytest.fixture
def mooncake(make: Callable[[dict[str, Any]], QueueCommand]) -> QueueCommand:
    return make({"mooncake": {}})


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


# --------------------------------------------------------------------------------------------------- what it gives


@pytest.mark.parametrize("kind", ["simple", "mooncake"])
def test_a_command_uses_the_queue_and_gives_its_exit_code(kind: str, request: pytest.FixtureRequest) -> None:
    queue: QueueCommand = request.getfixturevalue(kind)
    done = queue.up(sys.executable, "-c", PUT_AND_GET)
    assert done.stdout == "[0, 1, 2] ['hello']\n", done.stderr
    assert done.returncode == 7


LISTENERS = """
import json, os, psutil, socket, transfer_queue as tq
tq.init()
tq.kv_put(key="a", partition_id="p", fields={"note": "hello"})
found = []
for process in psutil.process_iter():
    try:
        if process.environ().get("XDG_STATE_HOME") != os.environ["XDG_STATE_HOME"]:
            continue
        listening = [each.laddr for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        found += [(process.pid, address.ip, address.port) for address in listening]
    except psutil.Error:
        continue
reached = []
for device in psutil.net_if_addrs().values():
    for own in device:
        if own.family == socket.AF_INET and not own.address.startswith("127."):
            for pid, _, port in found:
                with socket.socket() as probe:
                    if probe.connect_ex((own.address, port)) == 0:
                        reached.append((" ".join(psutil.Process(pid).cmdline()), own.address, port))
print(json.dumps([len({pid for pid, _, _ in found}), reached]))
tq.close()
"""


@pytest.mark.parametrize(("kind", "processes"), [("simple", 3), ("mooncake", 5)])
def test_nothing_listens_to_the_network(kind: str, processes: int, request: pytest.FixtureRequest) -> None:
    queue: QueueCommand = request.getfixturevalue(kind)
    done = queue.up(sys.executable, "-c", LISTENERS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [processes, []]


def test_a_signal_reaches_the_command_whose_end_ends_the_queue(simple: QueueCommand) -> None:
    handler = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))"
    code = f"{handler}; print(1, flush=True); signal.pause()"
    with simple.start("up", "-f", str(simple.file), "--", sys.executable, "-c", code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        process.terminate()
        assert process.wait(30) == 5


def test_a_command_ended_by_a_signal_gives_128_and_its_number(simple: QueueCommand) -> None:
    assert simple.up(sys.executable, "-c", "import os; os.kill(os.getpid(), 9)").returncode == 137


def test_in_the_foreground_it_serves_until_it_is_interrupted(simple: QueueCommand) -> None:
    with simple.start("up", "-f", str(simple.file)) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "TQ_CONFIG_FILE" in line:
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_detached_it_is_listed_and_taken_down(simple: QueueCommand) -> None:
    up = simple.run("up", "-f", str(simple.file), "--detach")
    assert up.returncode == 0, up.stderr
    attach = last_line(up.stderr).removeprefix("export TQ_CONFIG_FILE=")
    status = simple.run("status").stdout
    assert "test: simple backend" in status
    assert f"127.0.0.1:{simple.resource['spec']['controller']['port']}" in status
    assert f"TQ_CONFIG_FILE={attach}" in status
    second = simple.run("up", "-f", str(simple.file))
    assert (second.returncode, last_line(second.stderr)) == (
        1,
        "error: queue test is already running here; stop it with: tq down test",
    )
    alone = preloaded.run(
        [sys.executable, "-c", "import transfer_queue as tq; tq.init()"],
        env=simple.environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert f"; queue test runs here too: export TQ_CONFIG_FILE={attach} to use it" in alone.stderr
    assert simple.run("down").returncode == 0
    assert simple.processes() == []
    assert "no queue" in simple.run("status").stderr
    simple.environ["TQ_CONFIG_FILE"] = attach
    gone = simple.run("ls")
    assert gone.stderr.startswith("error: queue test ended: it was taken down; cannot reach the controller at ")
    assert f"(TQ_CONFIG_FILE={attach} names it)" in gone.stderr
    del simple.environ["TQ_CONFIG_FILE"]
    missing = simple.run("down", "test")
    assert (missing.returncode, missing.stderr) == (1, "error: queue test is not running here; running: none\n")


ATTACH_PLAINLY = """
import os, stat, sys, yaml
import transfer_queue as tq
from transfer_queue.errors import ConnectionLostError
with open(os.environ.pop("TQ_CONFIG_FILE")) as file:
    attach = yaml.safe_load(file)
for path in (attach["security"]["tls"]["key"], attach["security"]["tls"]["key"].replace("client", "server")):
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600, path
try:
    tq.init({"controller": attach["controller"]})
except ConnectionLostError as error:
    print(error)
"""


def test_with_tls_programs_use_the_certificates_of_the_queue_and_plain_tcp_is_told_so(simple: QueueCommand) -> None:
    simple.resource["spec"]["security"] = {"tls": {"mode": "operator"}}
    simple.write()
    done = simple.up(
        sys.executable,
        "-c",
        f"import subprocess, sys; subprocess.check_call(sys.argv[1:]){PUT_AND_GET}",
        sys.executable,
        "-c",
        ATTACH_PLAINLY,
    )
    assert done.returncode == 7, done.stderr
    refused, *rows = done.stdout.splitlines()
    assert "before it answered; if it speaks TLS, set security.tls" in refused
    assert rows == ["[0, 1, 2] ['hello']"]


def test_a_policy_gives_programs_the_rights_of_their_namespace(simple: QueueCommand) -> None:
    entry = {"name": "me", "namespace": "default", "roles": ["producer", "consumer"], "partitions": ["q"]}
    simple.resource["spec"]["security"] = {"policy": [entry]}
    simple.write()
    done = simple.up(sys.executable, "-c", PUT_AND_GET)
    assert "NotAuthorizedError: 'me' may not do" in done.stderr
    assert "partition prefixes: 'q'" in done.stderr
    done = simple.up(sys.executable, "-c", PUT_AND_GET.replace('"p"', '"q1"'))
    assert done.stdout == "[0, 1, 2] ['hello']\n", done.stderr


@pytest.mark.parametrize("kind", ["simple", "mooncake"])
def test_a_shard_that_ends_is_started_again_while_the_others_go_on(
    kind: str, make: Callable[[dict[str, Any]], QueueCommand]
) -> None:
    queue = make({kind: {}})
    spec = queue.resource["spec"]
    spec["controller"] |= {"shards": 2, "metricsPort": spec["controller"]["port"] + 9}
    spec["security"] = {"tls": {"mode": "operator"}}
    queue.write()
    up = queue.run("up", "-f", str(queue.file), "--detach")
    assert up.returncode == 0, up.stderr
    assert "2 controllers, 2 storage units" in up.stderr
    config = load_document(AttachConfig, last_line(up.stderr).removeprefix("export TQ_CONFIG_FILE="))
    client = tq.TransferQueueClient("test", config)
    kept, lost = (next(name for name in map(str, range(99)) if shard_of(name, 2) == shard) for shard in range(2))
    for name in (kept, lost):
        client.put(TensorDict({"x": torch.arange(3)}, batch_size=[3]), partition_id=name)
    assert [item["name"] for item in json.loads(queue.run("ls", "--output", "json").stdout)] == [kept, lost]
    victim = queue.named("controller-1.json")
    victim.kill()
    wait_until(lambda: not victim.is_running(), "it is gone")
    assert client.check_production_status(["x"], kept)
    wait_until(lambda: "serves again" in (queue.state / "transferqueue/test/tq.log").read_text(), "it is back")
    assert client.get_partition_list() == [kept]
    client.close()
    assert queue.run("down").returncode == 0


def test_queues_without_ports_take_free_ones_and_tell_their_pages(simple: QueueCommand) -> None:
    spec = simple.resource["spec"]
    del spec["controller"], spec["storage"]["port"], spec["storage"]["metricsPort"]
    for name in ("test", "second"):
        simple.resource["metadata"]["name"] = name
        simple.write()
        up = simple.run("up", "-f", str(simple.file), "--detach")
        assert up.returncode == 0, up.stderr
        assert "page: http://127.0.0.1:" in up.stderr
    queues = json.loads(simple.run("status", "-o", "json").stdout)
    assert [queue["name"] for queue in queues] == ["second", "test"]
    for queue in queues:
        assert f"page: {queue['page']}\n" in simple.run("status").stdout
        with urllib.request.urlopen(queue["page"], timeout=10) as page:
            assert page.status == 200
        assert simple.run("down", queue["name"]).returncode == 0


def test_a_command_with_options_needs_no_dashes_before_it(simple: QueueCommand) -> None:
    done = simple.run("up", "-f", str(simple.file), sys.executable, "-c", "raise SystemExit(3)")
    assert done.returncode == 3, done.stderr


# ------------------------------------------------------------------------------------------------ what is wrong


def unknown_field(spec: dict[str, Any]) -> None:
    spec["storage"]["replics"] = 2


def bad_quantity(spec: dict[str, Any]) -> None:
    spec["storage"]["capacity"] = "16MB"


def no_backend(spec: dict[str, Any]) -> None:
    spec["backend"]["simple"] = None


def two_backends(spec: dict[str, Any]) -> None:
    spec["backend"]["mooncake"] = {}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            unknown_field,
            'unknown field "spec.storage.replics"; did you mean replicas? allowed: affinity, annotations, capacity, '
            "drainSeconds, env, extraContainers, image,",
        ),
        (bad_quantity, 'spec.storage.capacity: "16MB" is not a quantity above zero; use a number with Ki, Mi,'),
        (no_backend, "spec.backend.simple: has no value; for its defaults write simple: {}"),
        (two_backends, "set exactly one of simple, mooncake, yuanrong, ray"),
    ],
)
def test_a_wrong_resource_is_refused_with_the_schema_s_message(
    simple: QueueCommand, spoil: Callable[[dict[str, Any]], None], says: str
) -> None:
    spoil(simple.resource["spec"])
    simple.write()
    with pytest.raises(ConfigError) as refused:
        load(simple.file)
    done = simple.up("true")
    assert done.stderr == f"error: {refused.value}\n"
    assert says in done.stderr
    assert done.returncode == 2


@pytest.mark.parametrize("kind", ["--detach", "--"])
def test_a_file_that_is_not_there_is_named(simple: QueueCommand, kind: str) -> None:
    simple.file.unlink()
    done = simple.run("up", "-f", str(simple.file), *([kind] if kind != "--" else ["--", "true"]))
    assert (done.returncode, done.stderr) == (2, f"error: {simple.file}: cannot be read: No such file or directory\n")


def test_a_command_that_is_not_there_is_named_before_anything_starts(simple: QueueCommand) -> None:
    done = simple.up("no-such-command")
    assert (done.returncode, done.stderr) == (2, "error: cannot run no-such-command: not found, or not executable\n")


@pytest.mark.parametrize(
    ("process", "setting"),
    [
        ("controller", ["controller", "port"]),
        ("storage-1", ["storage", "port"]),
        ("controller", ["controller", "metricsPort"]),
    ],
)
def test_a_port_in_use_is_one_line_with_process_and_port(
    simple: QueueCommand, process: str, setting: list[str]
) -> None:
    port = simple.resource["spec"][setting[0]][setting[1]] + (1 if process == "storage-1" else 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        done = simple.up("true")
    assert done.returncode == 1
    line = last_line(done.stderr)
    assert line.startswith(f"error: {process} did not start: ")
    assert str(port) in line
    assert "in use" in line
    assert "Traceback" not in done.stderr


def test_a_port_of_the_master_in_use_is_one_line_with_the_setting(mooncake: QueueCommand) -> None:
    port = mooncake.resource["spec"]["backend"]["mooncake"]["master"]["rpcPort"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        done = mooncake.up("true")
    assert done.returncode == 1
    assert f"port {port}" in last_line(done.stderr)
    assert "rpcPort" in last_line(done.stderr)
    assert "Traceback" not in done.stderr


def test_a_missing_libibverbs_is_one_line_with_the_package(mooncake: QueueCommand, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libibverbs.so.1").touch()  # found before the real one, and of no use
    mooncake.environ["LD_LIBRARY_PATH"] = str(tmp_path / "lib")
    done = mooncake.up("true")
    assert done.returncode == 1
    assert "libibverbs.so.1" in last_line(done.stderr)
    assert last_line(done.stderr).endswith("apt-get install libibverbs1")
    assert "Traceback" not in done.stderr


def test_a_master_that_dies_at_once_is_one_line_with_its_last_words(mooncake: QueueCommand, tmp_path: Path) -> None:
    binary = tmp_path / "site" / "mooncake" / "mooncake_master"
    binary.parent.mkdir(parents=True)
    (binary.parent / "__init__.py").touch()
    binary.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --help ]; then echo "    -rpc_port (port) type: int32 default: 1"; exit 1; fi\n'
        'echo "the segment allocator does not like this machine" >&2; exit 3\n'
    )
    binary.chmod(0o755)
    mooncake.environ["PYTHONPATH"] = f"{binary.parents[1]}:{mooncake.environ['PYTHONPATH']}"
    done = mooncake.up("true")
    assert done.returncode == 1
    assert last_line(done.stderr) == (
        "error: mooncake_master ended at once (exit status 3): the segment allocator does not like this machine"
    )


PUT_WHEN_TOLD = """
import sys, transfer_queue as tq
tq.init()
for line in sys.stdin:
    tq.kv_put(key=line, partition_id="p", fields={"x": 1})
    print(len(tq.kv_batch_get(line, "p")), flush=True)
"""


@pytest.mark.parametrize(
    ("kind", "victim", "says"),
    [
        ("simple", "storage-1.json", "storage-1 ended: killed by SIGKILL"),
        ("simple", "controller.json", "controller ended: killed by SIGKILL"),
        ("mooncake", "--rpc_port", "mooncake_master ended (SIGKILL)"),
    ],
)
def test_a_server_that_is_killed_is_started_again_and_programs_go_on(
    kind: str, victim: str, says: str, request: pytest.FixtureRequest
) -> None:
    queue: QueueCommand = request.getfixturevalue(kind)
    up = queue.run("up", "-f", str(queue.file), "--detach")
    assert up.returncode == 0, up.stderr
    environ = {**queue.environ, "TQ_CONFIG_FILE": last_line(up.stderr).removeprefix("export TQ_CONFIG_FILE=")}
    log = queue.state / "transferqueue" / "test" / "tq.log"
    with psutil.Popen([sys.executable, "-c", PUT_WHEN_TOLD], env=environ, stdin=-1, stdout=-1, text=True) as program:
        for turn in range(2):
            print("key", turn, file=program.stdin, flush=True)
            assert program.stdout.readline() == "1\n"
            if turn == 0:
                queue.named(victim).kill()
                wait_until(lambda: "serves again" in log.read_text(), "it is back", 60)
                assert says in log.read_text()
                assert "which are lost" in log.read_text()
        program.stdin.close()
    pids = {server["pid"] for server in json.loads(queue.run("status", "-o", "json").stdout)[0]["servers"]}
    assert pids <= {process.pid for process in queue.processes()}
    doctor = [item for item in json.loads(queue.run("doctor", "-o", "json").stdout) if item["check"] == "restarts"]
    assert [item["state"] for item in doctor] == ["warn"]
    assert "1 restart of servers of queue test" in doctor[0]["text"]
    assert says in doctor[0]["text"]
    assert queue.run("down").returncode == 0
    assert "test ended at" in queue.run("status").stderr


def test_a_journal_that_cannot_be_written_is_told_and_the_controller_started_again(simple: QueueCommand) -> None:
    simple.resource["spec"]["controller"]["durability"] = "process"
    simple.write()
    up = simple.run("up", "-f", str(simple.file), "--detach")
    assert up.returncode == 0, up.stderr
    client = tq.TransferQueueClient(
        "test", load_document(AttachConfig, last_line(up.stderr).removeprefix("export TQ_CONFIG_FILE="))
    )
    simple.named("controller.json").rlimit(psutil.RLIMIT_FSIZE, (0, 0))  # as if the disk were full, its log's too
    client.put(TensorDict({"x": torch.arange(3)}, batch_size=[3]), partition_id="p")
    assert client.get_partition_list() == ["p"]
    client.close()
    log = (simple.state / "transferqueue" / "test" / "tq.log").read_text()
    assert "controller ended: cannot write the journal in " in log
    assert "it is restarted now, with its rows" in log
    assert simple.run("down").returncode == 0
    shutil.rmtree(SHARED_MEMORY / f"transferqueue-{os.getuid()}" / "test")


def test_a_put_that_the_journal_has_no_room_for_is_told_why_at_once(simple: QueueCommand) -> None:
    simple.resource["spec"]["controller"]["durability"] = "process"
    simple.write()
    up = simple.run("up", "-f", str(simple.file), "--detach")
    attach = Path(last_line(up.stderr).removeprefix("export TQ_CONFIG_FILE="))
    client = tq.TransferQueueClient("test", load_document(AttachConfig, attach))
    (journal,) = (attach.parent / "journal").glob("segment-*")
    room = journal.stat().st_size + 20_000
    keeper = psutil.Process(json.loads(simple.run("status", "-o", "json").stdout)[0]["pid"])
    for process in (keeper, simple.named("controller.json")):
        process.rlimit(psutil.RLIMIT_FSIZE, (room, room))
    tags = [{"note": "x" * 200}] * 1000
    with pytest.raises(JournalWriteError, match=r"cannot write the journal in .*: File too large; make room"):
        client.put({"x": torch.arange(1000)}, partition_id="p", custom_meta=tags)
    assert client.put({"x": torch.arange(3)}, partition_id="p").size == 3
    client.close()
    assert simple.run("down").returncode == 0
    shutil.rmtree(SHARED_MEMORY / f"transferqueue-{os.getuid()}" / "test")


def test_a_state_folder_that_fills_up_does_not_end_the_queue(simple: QueueCommand) -> None:
    up = simple.run("up", "-f", str(simple.file), "--detach")
    assert up.returncode == 0, up.stderr
    attach = last_line(up.stderr).removeprefix("export TQ_CONFIG_FILE=")
    client = tq.TransferQueueClient("test", load_document(AttachConfig, attach))
    keeper = psutil.Process(json.loads(simple.run("status", "-o", "json").stdout)[0]["pid"])
    keeper.rlimit(psutil.RLIMIT_FSIZE, (0, 0))  # as if the disk were full, for the servers that it starts too
    ended = simple.named("controller.json")
    ended.kill()
    ended.wait(60)
    client.put(TensorDict({"x": torch.arange(3)}, batch_size=[3]), partition_id="p")
    assert client.get_partition_list() == ["p"]
    client.close()
    assert simple.run("down").returncode == 0


def test_a_state_folder_without_room_is_one_line(simple: QueueCommand) -> None:
    tq_up = [sys.executable, "-m", "transfer_queue.cli", "up", "-f", str(simple.file), "true"]
    limited = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *tq_up]
    done = subprocess.run(limited, env=simple.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert last_line(done.stderr).startswith(f"error: cannot write {simple.state}/transferqueue/test/")
    assert "File too large; make room" in last_line(done.stderr)
    assert "Traceback" not in done.stderr


def test_a_server_that_cannot_start_ends_the_queue_and_programs_and_status_tell_why(simple: QueueCommand) -> None:
    simple.resource["spec"]["controller"]["durability"] = "process"
    simple.write()
    up = simple.run("up", "-f", str(simple.file), "--detach")
    assert up.returncode == 0, up.stderr
    attach = Path(last_line(up.stderr).removeprefix("export TQ_CONFIG_FILE="))
    client = tq.TransferQueueClient("test", load_document(AttachConfig, attach))
    simple.environ["TQ_CONFIG_FILE"] = str(attach)
    client.put(TensorDict({"x": torch.arange(3)}, batch_size=[3]), partition_id="p")
    for path in (attach.parent / "journal").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged" + path.read_bytes()[7:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TQ_CONFIG_FILE", str(attach))
        simple.named("controller.json").kill()
        wait_until(lambda: not simple.processes(), "the queue ended", 90)
        with pytest.raises(ConnectionLostError, match=r"queue test ended: controller did not start: .*journal"):
            client.kv_list("p")
        client.close()
    assert "controller did not start: " in simple.run("status").stderr
    shutil.rmtree(SHARED_MEMORY / f"transferqueue-{os.getuid()}" / "test")


@pytest.mark.parametrize("kind", ["simple", "mooncake"])
def test_servers_never_outlive_a_killed_tq(kind: str, request: pytest.FixtureRequest) -> None:
    queue: QueueCommand = request.getfixturevalue(kind)
    assert queue.run("up", "-f", str(queue.file), "--detach").returncode == 0
    keeper = queue.named("--background")
    assert len(queue.processes()) > 3
    keeper.kill()
    wait_until(lambda: not queue.processes(), "every server is gone", 30)
    assert "no queue" in queue.run("status").stderr


def test_a_trainer_without_a_controller_says_where_it_looked(simple: QueueCommand) -> None:
    port = simple.resource["spec"]["controller"]["port"]
    simple.environ["TQ_CONTROLLER_ADDRESS"] = f"127.0.0.1:{port}"
    trainer = Path(__file__).parents[2] / "examples" / "cartpole" / "trainer.py"
    with psutil.Popen([sys.executable, str(trainer)], env=simple.environ, stderr=-1, text=True) as process:
        _, err = process.communicate(timeout=110)
    assert process.returncode == 1
    *told, error = err.splitlines()
    assert any("trying for" in line for line in told), err
    assert f"TQ_CONTROLLER_ADDRESS=127.0.0.1:{port}" in error


def test_local_servers_of_init_never_outlive_a_killed_program(simple: QueueCommand) -> None:
    code = "import transfer_queue as tq, signal; tq.init(); print(1, flush=True); signal.pause()"
    with psutil.Popen([sys.executable, "-c", code], env=simple.environ, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "1\n"
        assert len(simple.processes()) == 4
        os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not simple.processes(), "every server is gone", 30)
