"""Three real masters over a real etcd, started with the flags that the operator gives them."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.integration.etcd import running_etcd
from tests.integration.mooncake.conftest import Driven, Unit
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
    """Processes by name of the pod that each would be in."""

    def __init__(self, etcd: str, folder: Path, stack: ExitStack) -> None:
        self.queues: list[Queue] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._etcd = etcd
        ports = free_ports(6)
        self.admin_ports = ports[3:]
        for number, (rpc, metrics) in enumerate(zip(ports[:3], ports[3:], strict=True)):
            made = master_queue(etcd, rpc, metrics)
            name = f"master-{number}"
            process = stack.enter_context(running(name, command(made), folder, lambda port=metrics: listens(port)))
            self.queues.append(made)
            self.processes.append(process)

    @property
    def admin_address(self) -> str:
        return ";".join(f"127.0.0.1:{port}" for port in self.admin_ports)

    def settings(self) -> dict[str, Any]:
        made: dict[str, Any] = controller_settings(self.queues[0])["controller"]["backend"]["settings"]
        return {**made, "adminAddress": self.admin_address, "startTimeout": 20}

    def logged(self) -> str:
        """Up to where the log of the masters is in etcd; in order, so that it says so of all that came before."""
        key = base64.b64encode(f"/oplog/{self.queues[0].cluster_id}/durable_prefix".encode()).decode()
        request = urllib.request.Request(f"http://{self._etcd}/v3/kv/range", json.dumps({"key": key}).encode())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=5) as answer:
            found = json.load(answer).get("kvs", [])
        return str(found[0]["version"]) if found else "0"

    def wait_for_the_log(self) -> None:
        """Until what is acknowledged now is in etcd: in the batch that is being written, or in the one after it."""
        for _ in range(2):
            seen = self.logged()
            wait_until(lambda seen=seen: self.logged() != seen, "the log goes on")

    def leader(self) -> int | None:
        serving = [n for n, port in enumerate(self.admin_ports) if Admin(f"127.0.0.1:{port}", timeout_s=1).ready()]
        assert len(serving) < 2, f"masters {serving} lead at once"
        return serving[0] if serving else None


@pytest.fixture
def masters(tmp_path: Path) -> Iterator[Masters]:
    with ExitStack() as stack:
        etcd = stack.enter_context(running_etcd(tmp_path))
        group = Masters(etcd, tmp_path, stack)
        wait_until(lambda: group.leader() is not None, "a master leads")
        yield group


def test_a_killed_leader_costs_no_acknowledged_block_that_is_in_the_log(
    masters: Masters, start_unit: StartUnit, run: str
) -> None:
    settings = masters.settings()
    unit = start_unit(settings)
    unit.ask("registered", 0, run)
    client = Driven("client_process", json.dumps(settings), run, msgspec.json.encode(unit.info).decode())
    try:
        acknowledged: list[int] = []
        enough, killed, at_kill = threading.Event(), threading.Event(), 0

        def load() -> None:
            for number in range(1, 1000):
                said = client.ask("put", number, timeout_s=90)
                assert said in ("stored", "ConnectionLostError")
                if said == "stored":
                    acknowledged.append(number)
                else:  # no leader: the next one is tried
                    time.sleep(0.2)
                if len(acknowledged) == 20:
                    enough.set()
                if killed.is_set() and acknowledged[-1] > at_kill + 3:
                    return

        with ThreadPoolExecutor(1) as worker:
            putting = worker.submit(load)
            assert enough.wait(60)
            leader = masters.leader()
            assert leader is not None
            logged = acknowledged[:]
            masters.wait_for_the_log()
            masters.processes[leader].send_signal(signal.SIGKILL)
            at_kill = acknowledged[-1]
            killed.set()
            putting.result(60)
        assert unit.losses == 0, "the unit took its blocks for lost"

        def found(number: int) -> str:
            said = client.ask("get", number)
            return "" if said == "ConnectionLostError" else str(said)

        for number in acknowledged:
            said = wait_until(lambda number=number: found(number), f"block {number} is read or gone")
            if said == "StorageKeyNotFoundError":  # acknowledged in the leader's last moment
                assert number not in logged
            else:
                assert said == "same"
        assert masters.leader() not in (leader, None)
        assert set(logged) <= set(unit.ask("inventory"))
    finally:
        client.end()


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
