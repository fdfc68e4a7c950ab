"""Three real masters over a real etcd, started with the flags that the operator gives them."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.integration.etcd import Etcd, running_etcd
from tests.integration.mooncake.conftest import MIB, Driven, Unit
from tests.unit.operator.queues import IMAGES, queue
from tests.waiting import wait_until
from tq_operator.plan.children import desired_children
from tq_operator.plan.queue import Queue
from tq_operator.plan.settings import controller_settings
from tq_operator.plan.status import MasterGroup, Observation
from tq_operator.runtime.masters import master_group
from transfer_queue.storage.conformance.process import free_ports, listens, running
from transfer_queue.storage.mooncake import engine
from transfer_queue.storage.mooncake.admin import Admin
from transfer_queue.storage.mooncake.parts import block_of, prefix_of

StartUnit = Callable[..., Unit]
SPEC = """
backend:
  mooncake:
    protocol: tcp
    zeroCopy: {tensorBufferSize: 128Mi, bytesBufferSize: 128Mi}
    master: {rpcInterface: lo, rpcPort: RPC, metricsPort: METRICS, httpMetadataPort: 1}
    highAvailability: {etcd: {endpoints: ["ETCD"]}}
"""


def master_queue(etcd: str, rpc: int, metrics: int) -> Queue:
    text = SPEC.replace("RPC", str(rpc)).replace("METRICS", str(metrics))
    return queue(text.replace("ETCD", etcd))


def command(made: Queue) -> list[str]:
    found = {(c["kind"], c["metadata"]["name"]): c for c in desired_children(made, IMAGES)}
    words = found["StatefulSet", "quickstart-mooncake-masters"]["spec"]["template"]["spec"]["containers"][0]["command"]
    return [engine.find_master(), *words[1:]]


class Masters:
    """Processes, each with the ports that it would have in a pod of its own."""

    def __init__(self, etcd: Etcd, folder: Path, stack: ExitStack) -> None:
        self.etcd = etcd
        self._folder, self._stack = folder, stack
        ports = free_ports(6)
        self.admin_ports = ports[3:]
        self.queues = [master_queue(etcd.address, rpc, admin) for rpc, admin in zip(ports[:3], ports[3:], strict=True)]
        self.processes = [self._started(number) for number in range(3)]

    def _started(self, number: int) -> subprocess.Popen[bytes]:
        port, words = self.admin_ports[number], command(self.queues[number])
        return self._stack.enter_context(running(f"master-{number}", words, self._folder, lambda: listens(port)))

    def kill_leader(self) -> int:
        """Its number."""
        number = self.leader()
        assert number is not None
        self.processes[number].send_signal(signal.SIGKILL)
        self.processes[number].wait()
        return number

    def wait_for_leader(self) -> None:
        wait_until(lambda: self.leader() is not None, "a master leads", 60)

    def restart(self, number: int) -> None:
        self.processes[number] = self._started(number)

    @property
    def admin_address(self) -> str:
        return ";".join(f"127.0.0.1:{port}" for port in self.admin_ports)

    def settings(self) -> dict[str, Any]:
        made: dict[str, Any] = controller_settings(self.queues[0])["controller"]["backend"]["settings"]
        return {**made, "adminAddress": self.admin_address, "startTimeout": 20}

    def leader(self) -> int | None:
        serving = [n for n, port in enumerate(self.admin_ports) if Admin(f"127.0.0.1:{port}", timeout_s=1).ready()]
        assert len(serving) < 2, f"masters {serving} lead at once"
        return serving[0] if serving else None


@pytest.fixture
def masters(tmp_path: Path) -> Iterator[Masters]:
    with ExitStack() as stack:
        etcd = Etcd(tmp_path)
        stack.callback(etcd.stop)
        etcd.start()
        group = Masters(etcd, tmp_path, stack)
        group.wait_for_leader()
        yield group


class Load(Driven):
    """A process that puts blocks on a unit, three at a time, and reads them. See client_process.py."""

    def __init__(self, settings: dict[str, Any], unit: Unit, run: str) -> None:
        self.unit = unit
        self.stored: list[int] = []
        super().__init__("client_process", json.dumps(settings), run, msgspec.json.encode(unit.info).decode())
        self.tell("write", 3)

    def hear(self, words: list[Any]) -> None:
        if words[0] == "stored":
            self.stored.append(words[1])
        else:
            super().hear(words)

    def wait_for(self, more: int) -> None:
        target = len(self.stored) + more
        wait_until(lambda: len(self.stored) >= target, f"{more} more blocks are stored", 90)

    def check(self, numbers: list[int]) -> None:
        """All of these are there, and whole."""
        found = self.ask("get", numbers, timeout_s=120)
        assert dict(zip(numbers, found, strict=True)) == dict.fromkeys(numbers, "same")


@pytest.fixture
def load(masters: Masters, start_unit: StartUnit, run: str) -> Iterator[Load]:
    settings = masters.settings()
    unit = start_unit(settings, capacity=256 * MIB)
    unit.ask("registered", 0, run)
    made = Load(settings, unit, run)
    yield made
    made.kill()


def test_leaders_killed_one_after_the_other_under_load_cost_no_acknowledged_block(masters: Masters, load: Load) -> None:
    load.wait_for(15)
    killed = []
    for _ in range(2):
        killed.append(masters.kill_leader())
        masters.wait_for_leader()
    masters.restart(killed[0])
    load.wait_for(15)
    load.check(random.sample(load.stored, 10))
    killed.append(masters.kill_leader())
    masters.wait_for_leader()
    load.wait_for(15)
    load.ask("stop", timeout_s=120)
    assert killed[0] != killed[1] != killed[2]
    load.check(load.stored)
    assert load.unit.losses == 0, "the unit took its blocks for lost"
    wait_until(lambda: load.unit.doubts, "the unit tells anew what it holds")
    assert set(load.stored) <= set(load.unit.ask("inventory"))


def test_a_block_that_is_not_in_the_log_is_not_acknowledged(masters: Masters, load: Load, run: str) -> None:
    load.wait_for(9)
    leader = masters.leader()
    assert leader is not None
    admin = Admin(f"127.0.0.1:{masters.admin_ports[leader]}")
    masters.etcd.process.send_signal(signal.SIGSTOP)  # the leader goes on, its log does not
    try:
        before = set(admin.keys(prefix_of(run)))
        wait_until(lambda: len(set(admin.keys(prefix_of(run))) - before) >= 2, "the leader has further blocks")
        further = set(block_of(set(admin.keys(prefix_of(run))) - before, run).values())
        masters.kill_leader()
    finally:
        masters.etcd.process.send_signal(signal.SIGCONT)
    load.wait_for(9)
    load.ask("stop", timeout_s=120)
    load.check(load.stored)
    assert further <= set(load.stored), "the puts stored their blocks again"
    assert load.unit.losses == 0


def test_the_operator_finds_the_leader_and_tells_why_there_is_none(tmp_path: Path) -> None:
    rpc, metrics = free_ports(2)
    with ExitStack() as stack:
        etcd = stack.enter_context(running_etcd(tmp_path))
        made = master_queue(etcd, rpc, metrics)
        pod = {
            "metadata": {"name": "quickstart-mooncake-masters-0"},
            "status": {"podIP": "127.0.0.1", "containerStatuses": [{"state": {"running": {}}}]},
        }
        seen = Observation(pods=[pod])
        with running("master", command(made), tmp_path, lambda: listens(metrics)):
            leading = MasterGroup(leader="quickstart-mooncake-masters-0")
            wait_until(lambda: master_group(made, seen) == leading, "the operator sees the leader")
            stack.close()  # etcd ends

            def reported() -> str:
                found = master_group(made, seen)
                return found.etcd if found else ""

            assert etcd in wait_until(reported, "the operator sees that etcd is gone")
    assert master_group(made, Observation()) is None


CLOSES = """
import json, sys
from transfer_queue.storage.mooncake.settings import MooncakeSettings
from transfer_queue.storage.mooncake.store import open_store

store = open_store(MooncakeSettings.model_validate(json.loads(sys.argv[1])), int(sys.argv[2]))
store.close()
sys.exit(3)
"""


@pytest.mark.parametrize("segment_bytes", [0, 64 * MIB])
def test_a_process_that_closes_ends_at_once_with_its_own_status(masters: Masters, segment_bytes: int) -> None:
    words = [sys.executable, "-c", CLOSES, json.dumps(masters.settings()), str(segment_bytes)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=25)  # the engine itself takes 30 s
    assert done.returncode == 3, done.stderr
    if not segment_bytes:
        assert masters.etcd.keys("mooncake/") == [], "a client's entries in the metadata store are gone"
