"""Which master leads, and why none does, from what masters and etcd answer over HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import msgspec
import pytest

from tests.unit.operator.queues import queue
from tq_operator.plan.names import selector
from tq_operator.plan.queue import Queue
from tq_operator.plan.status import MasterGroup, Observation
from tq_operator.runtime.checkpoints import checkpoint_report
from tq_operator.runtime.masters import master_group
from transfer_queue.config.running import CheckpointReport, LastCheckpoint, Restored

LEADS, FOLLOWS = {"service_ready": True}, {"service_ready": False}


@contextmanager
def answering(*answers: tuple[int, Any]) -> Iterator[int]:
    """A port that answers so, one request after the other, and the last way from then on."""
    rest = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = rest.pop(0) if len(rest) > 1 else rest[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def group(masters: int, etcd: int) -> Queue:
    spec = "{endpoints: ['127.0.0.1:ETCD']}".replace("ETCD", str(etcd))
    mooncake = f"{{protocol: tcp, master: {{metricsPort: {masters}}}, highAvailability: {{etcd: {spec}}}}}"
    return queue(f"{{backend: {{mooncake: {mooncake}}}}}")


def pods(*states: str) -> Observation:
    found = []
    for number, state in enumerate(states):
        status = {"podIP": "127.0.0.1", "containerStatuses": [{"state": {state: {}}}]}
        found.append({"metadata": {"name": f"quickstart-mooncake-masters-{number}"}, "status": status})
    return Observation(pods=found)


def test_the_master_that_serves_leads() -> None:
    with answering((200, FOLLOWS), (200, LEADS)) as port:
        found = master_group(group(port, closed_port()), pods("running", "running", "running"))
    assert found == MasterGroup(leader="quickstart-mooncake-masters-1")


@pytest.mark.parametrize(
    ("etcd", "words"),
    [
        ((200, {"health": "true"}), ""),
        ((503, {"health": "false", "reason": "RAFT NO LEADER"}), "RAFT NO LEADER"),
        ((200, ["garbage"]), "answers ['garbage']"),
        ((503, {"reason": "x" * 1_000_000}), "xxx"),
        (None, "Connection refused"),
    ],
)
def test_without_a_leader_etcd_is_asked(etcd: tuple[int, Any] | None, words: str) -> None:
    with answering((200, FOLLOWS)) as masters, answering(etcd or (200, {})) as port:
        found = master_group(group(masters, port if etcd else closed_port()), pods("running"))
    assert found is not None
    assert not found.leader
    assert bool(found.etcd) == bool(words)
    assert words in found.etcd
    assert len(found.etcd) < 300


def test_masters_that_do_not_run_are_not_asked() -> None:
    assert master_group(group(closed_port(), closed_port()), pods("waiting", "terminated")) is None


def test_a_long_report_of_a_restore_is_read_whole() -> None:
    url = "s3://" + "b" * 1019
    restored = Restored(url, False, f"{url} was not loaded: the queue is not empty")
    report = CheckpointReport(LastCheckpoint(rows=1, url=url, error="x" * 1000), restored)
    with answering((200, json.loads(msgspec.json.encode(report)))) as port:
        saves = queue(f"{{backend: {{simple: {{}}}}, restoreFrom: {url}, checkpoint: {{metricsPort: {port}}}}}")
        pod = pods("running").pods[0]
        pod["metadata"]["labels"] = selector(saves.name, "checkpoint")
        assert checkpoint_report(saves, Observation(pods=[pod])) == report
