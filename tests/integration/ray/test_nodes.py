"""A cluster of two nodes, each with an address of its own: where storage units go, and what the loss of a node does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.ray.cluster import CONF, HOST, RayCluster
from tests.waiting import wait_until
from transfer_queue.errors import TransferQueueError

pytestmark = pytest.mark.timeout(300)  # seconds; Ray starts a process for each actor

WORKER_HOST = "127.0.0.3"


@pytest.fixture
def worker_node(driver: RayCluster) -> Iterator[Any]:
    node = driver.add_node(WORKER_HOST, 4, {"disk": 1})
    try:
        wait_until(lambda: node.check() or _nodes() == {HOST, WORKER_HOST}, "the node joins", 120)
        yield node
    finally:
        tq.close()
        node.stop()
        wait_until(lambda: _nodes() == {HOST}, "the node's end is noticed", 120)


def _nodes() -> set[str]:
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _hosts_of_units() -> list[str]:
    """Empty while one is being restarted."""
    units = ray.get(ray.get_actor("TransferQueueController", "transfer_queue").units.remote())
    try:
        return [ray.get(unit.addresses.remote(), timeout=60)[0].rpartition(":")[0] for unit in units]
    except ray.exceptions.RayActorError:
        return []


def _row(value: int) -> TensorDict:
    return TensorDict({"x": torch.tensor([value])}, batch_size=[1])


def _puts() -> bool:
    try:
        tq.kv_batch_put(["k"], "p", _row(2))
    except TransferQueueError:
        return False
    return True


def test_units_keep_off_the_head_and_come_back_there_when_their_node_is_lost(worker_node: Any) -> None:
    tq.init(CONF)
    assert _hosts_of_units() == [WORKER_HOST, WORKER_HOST]
    tq.kv_batch_put(["k"], "p", _row(1))
    assert tq.kv_batch_get(["k"], "p")["x"].tolist() == [1]
    worker_node.stop(at_once=True)
    wait_until(_puts, "puts succeed again", 120)
    assert tq.kv_batch_get(["k"], "p")["x"].tolist() == [2]
    wait_until(lambda: _hosts_of_units() == [HOST, HOST], "both units are back", 120)


def test_units_spread_over_all_nodes_or_keep_to_those_with_a_resource(worker_node: Any) -> None:
    tq.init({**CONF, "ray": {"use_head_node": True}})
    assert sorted(_hosts_of_units()) == [HOST, WORKER_HOST]
    tq.close()
    simple = {**CONF["backend"]["SimpleStorage"], "required_node_resource": "disk"}
    tq.init({"backend": {"SimpleStorage": simple}, "ray": {"use_head_node": True}})
    assert _hosts_of_units() == [WORKER_HOST, WORKER_HOST]
