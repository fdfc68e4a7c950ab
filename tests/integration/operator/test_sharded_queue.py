"""What the operator and ``kubectl tq`` learn from several controllers that really run."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.unit.operator.queues import IMAGES, document, queue
from tests.unit.operator.signals import same_signals
from tests.waiting import wait_until
from tq_operator.kubectl import main
from tq_operator.plan.children import desired_children
from tq_operator.runtime.usage import storage_usage
from transfer_queue.control.directory import shard_of
from transfer_queue.launch.local import LocalStack, default_plan

SHARDS = 2
SPEC = f"{{backend: {{simple: {{}}}}, controller: {{shards: {SHARDS}}}}}"


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with LocalStack(default_plan(units=1, unit_capacity=16 << 20, shards=SHARDS)).start() as made:
        yield made


@pytest.fixture
def partitions(stack: LocalStack) -> Iterator[list[str]]:
    """One with a row on each shard."""
    tq.init({"controller": {"addresses": stack.controller_addresses}})
    names = [
        next(name for name in iter(lambda: uuid.uuid4().hex, "") if shard_of(name, SHARDS) == shard)
        for shard in range(SHARDS)
    ]
    for name in names:
        tq.get_client().put(TensorDict({"x": torch.zeros(1, 100_000)}, batch_size=[1]), partition_id=name)
    yield names
    for name in names:
        tq.get_client().clear_partition(name)
    tq.close()


def test_every_shard_tells_how_much_all_of_them_hold(stack: LocalStack, partitions: list[str]) -> None:
    pages = [f"http://{controller.address['metrics']}/metrics" for controller in stack.processes[:SHARDS]]
    assert len(set(pages)) == SHARDS

    def heard() -> list[int]:
        return [storage_usage(page).used or 0 for page in pages]

    wait_until(lambda: all(used >= SHARDS * 400_000 for used in heard()), "all shards know of all")
    tq.get_client().clear_partition(partitions[1])
    wait_until(lambda: all(used < SHARDS * 400_000 for used in heard()), "all hear what is freed")


def test_the_plugin_shows_all_shards_as_one(
    stack: LocalStack, partitions: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (template,) = (
        child["spec"]["template"] for child in desired_children(queue(SPEC), IMAGES) if child["kind"] == "Deployment"
    )
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    pod = {**template, "metadata": {**template["metadata"], "name": "q-0", "uid": "u"}, "status": ready}

    class Cluster:
        """With the queue and the pod of its controllers."""

        def queue(self, _: str | None) -> dict[str, Any]:
            return document(SPEC)

        def pods(self, *_: str) -> list[dict[str, Any]]:
            return [pod]

    class Forwarder:
        """Stands for a port of the pod: to the shard that would listen there."""

        failure = ""

        def __init__(self, _: Any, find_pod: Any, port: int) -> None:
            assert find_pod() == "q-0"
            self.address = stack.controller_addresses[port - 50060].replace("127.0.0.1", "localhost")

        def __enter__(self) -> Forwarder:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("tq_operator.kubectl.access.connect", lambda *_: Cluster())
    monkeypatch.setattr("tq_operator.kubectl.streams.Forwarder", Forwarder)
    with same_signals():
        assert main(["top", "--once", "-o", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {partition["name"] for partition in shown["partitions"]} == set(partitions)
    assert [unit["name"] for unit in shown["units"]] == ["storage-0"]
