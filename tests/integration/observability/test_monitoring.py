"""Dashboards, alerts and the page of metrics against what real servers expose."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.observability.promql import CHART_FILES, asked_metrics, metric_names
from tests.integration.stack import ROOT, Stack, running_stack
from tests.waiting import wait_until
from transfer_queue.client import TransferQueueClient
from transfer_queue.config.attach import AttachConfig, ControllerAddresses
from transfer_queue.errors import KeyNotFoundError
from transfer_queue.runtime.metrics import CATALOG, MOST_PARTITIONS, MOST_TASKS
from transfer_queue.storage.mooncake.master import MasterProcess
from transfer_queue.storage.mooncake.settings import MasterSettings

ENDINGS = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def put(keys: list[str], partition: str, **fields: torch.Tensor) -> None:
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=TensorDict(dict(fields), [len(keys)]))


@pytest.fixture(scope="module")
def used() -> Iterator[Stack]:
    """A queue that has seen every kind of event that its metrics tell of."""
    with running_stack(units=1, sample_capacity=1000) as stack:
        tq.init({"controller": {"addresses": [stack.address]}})
        client = tq.get_client()
        put(["a", "b", "c"], "train", tokens=torch.ones(3, 200_000))
        put(["a"], "train", reward=torch.ones(1))
        tq.kv_batch_get(["a", "b"], "train", ["tokens"])
        client.get_meta(["tokens"], 2, "train", task_name="reference")
        with pytest.raises(KeyNotFoundError):
            tq.kv_batch_get(["nobody"], "train")
        got: list[Any] = []
        waiter = threading.Thread(
            target=lambda: got.append(client.get_meta(["reward"], 2, "train", task_name="trainer", timeout=30))
        )
        waiter.start()
        wait_until(lambda: stack.controller.metric("tq_controller_waiting") == 1, "the trainer waits")
        put(["b"], "train", reward=torch.ones(1))
        waiter.join(30)
        assert len(got) == 1
        yield stack
        tq.close()


@pytest.fixture(scope="module")
def controller(used: Stack) -> dict[str, list[tuple[dict[str, str], float]]]:
    return samples(used.controller.http("/metrics")[1])


@pytest.fixture(scope="module")
def unit(used: Stack) -> dict[str, list[tuple[dict[str, str], float]]]:
    return samples(used.units[0].http("/metrics")[1])


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[set[str]]:
    settings = MasterSettings(rpc_port=0, http_metadata_port=0, metrics_port=0)
    process = MasterProcess(settings, tmp_path_factory.mktemp("master") / "log")
    endpoints = process.start()
    try:
        with urllib.request.urlopen(f"http://{endpoints.admin_address}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        yield {re.split(r"[ {]", line)[0] for line in lines if line and not line.startswith("#")}
    finally:
        process.stop()


def test_no_panel_and_no_alert_asks_for_a_metric_that_no_server_exposes(
    controller: dict[str, Any], unit: dict[str, Any], master: set[str]
) -> None:
    exposed = {*controller, *unit, *master}
    asked = {(where, name) for where, name in asked_metrics() if not name.startswith("tq_operator_")}
    assert len(asked) > 40
    assert not [(where, name) for where, name in sorted(asked) if name not in exposed]


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ('sum by (le, job) (rate(a_total{job=~"$job", b="c_d"}[5m])) > 1', {"a_total"}),
        ("histogram_quantile(0.99, sum by (le) (rate(a_bucket[1m])))", {"a_bucket"}),
        ("a / b > 0.9 and on (instance) (c or d:e == 1e3)", {"a", "b", "c", "d:e"}),
    ],
)
def test_names_of_metrics_are_told_from_the_rest_of_an_expression(expression: str, names: set[str]) -> None:
    assert metric_names(expression) == names


def test_every_metric_of_the_catalog_is_exposed_and_no_other(controller: dict[str, Any], unit: dict[str, Any]) -> None:
    for server, exposed in (("controller", controller), ("storage unit", unit)):
        expected = {
            name + ending for name, info in CATALOG.items() if server in info.servers for ending in ENDINGS[info.kind]
        }
        expected -= {"tq_device_used_bytes", "tq_device_capacity_bytes"}  # no client keeps rows on a GPU here
        assert {name for name in exposed if not name.startswith("process_")} == expected


def test_metrics_tell_what_happened(controller: dict[str, Any], unit: dict[str, Any]) -> None:
    assert controller["tq_rows_put_total"] == [({}, 5.0)]
    assert controller["tq_rows_fetched_total"] == [({}, 4.0)]
    assert controller["tq_controller_sample_capacity"] == [({}, 1000.0)]
    assert ({"partition": "train", "field": "reward"}, 2.0) in controller["tq_field_ready_rows"]
    assert ({"partition": "train", "task": "reference"}, 2.0) in controller["tq_task_consumed_rows"]
    assert controller["tq_controller_tasks"] == controller["tq_controller_subscriptions"] == [({}, 2.0)]
    assert 512 <= controller["tq_partition_task_bytes"][0][1] <= 4096
    assert ({"partition": "train", "task": "reference", "fields": "tokens"}, 1.0) in controller["tq_task_ready_rows"]
    assert controller["tq_controller_wait_seconds_count"] == [({}, 1.0)]
    assert ({"request": "Commit"}, 3.0) in controller["tq_controller_requests_total"]
    assert ({"request": "Lookup"}, 1.0) in controller["tq_controller_request_errors_total"]
    assert controller["tq_bytes_put_total"][0][1] >= 3 * 200_000 * 4
    assert unit["tq_unit_stored_bytes_total"] == controller["tq_bytes_put_total"]
    assert unit["tq_unit_shared_read_bytes_total"][0][1] >= 3 * 200_000 * 4
    assert unit["tq_unit_registered"] == [({}, 1.0)]


def test_only_the_newest_partitions_have_series_of_their_own() -> None:
    with running_stack(units=1) as stack:
        client = TransferQueueClient("steps", AttachConfig(controller=ControllerAddresses(addresses=[stack.address])))
        for number in range(MOST_PARTITIONS + 2):
            client.run(client.kv.put_one, "a", f"step_{number}", None, {"n": 1}, None)
        exposed = samples(stack.controller.http("/metrics")[1])
        client.close()
    named = [labels["partition"] for labels, _ in exposed["tq_partition_rows"]]
    assert named == [f"step_{number}" for number in range(2, MOST_PARTITIONS + 2)]
    assert exposed["tq_controller_partitions"] == [({}, MOST_PARTITIONS + 2.0)]


def test_only_the_newest_tasks_have_series_of_their_own() -> None:
    with running_stack(units=1) as stack:
        client = TransferQueueClient("tasks", AttachConfig(controller=ControllerAddresses(addresses=[stack.address])))
        client.run(client.kv.put_one, "a", "train", {"x": torch.ones(1)}, {"n": 1}, None)
        for number in range(MOST_TASKS + 2):
            client.get_meta(["x"], 1, "train", task_name=f"task_{number}")
        exposed = samples(stack.controller.http("/metrics")[1])
        client.close()
    named = [labels["task"] for labels, _ in exposed["tq_task_consumed_rows"]]
    assert named == [f"task_{number}" for number in range(2, MOST_TASKS + 2)]
    assert exposed["tq_controller_tasks"] == [({}, MOST_TASKS + 2.0)]


def test_a_controller_follows_the_number_of_units_in_its_file() -> None:
    with running_stack(units=1) as stack:
        controller = stack.controller
        assert controller.http("/readyz")[0] == 200
        file = stack.folder / "controller.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "expectedUnits": 3}))
        assert controller.http("/readyz") == (503, "1 of 3 storage units are registered\n")
        assert controller.metric("tq_units_expected") == 3
        assert json.loads(controller.http("/api/dataflow")[1])["expected_units"] == 3


def test_every_alert_says_what_to_do() -> None:
    rules = yaml.safe_load((CHART_FILES / "alerts" / "transferqueue.yaml").read_text())["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description"} == set(rule["annotations"])


def test_the_page_of_metrics_is_up_to_date() -> None:
    from transfer_queue.runtime.metrics_page import page

    assert Path(ROOT / "docs" / "metrics.md").read_text() == page()
