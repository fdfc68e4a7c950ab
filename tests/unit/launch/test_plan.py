"""Which processes a resource becomes on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from transfer_queue.config.resource import TransferQueue, load, parse
from transfer_queue.errors import ConfigError
from transfer_queue.launch.plan import plan_local, with_backend

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"


def queue(backend: dict[str, Any], **spec: Any) -> TransferQueue:
    return parse(
        {
            "apiVersion": "transferqueue.io/v1alpha1",
            "kind": "TransferQueue",
            "metadata": {"name": "q"},
            "spec": {"backend": backend, **spec},
        }
    )


def test_storage_units_get_consecutive_ports_and_their_controller() -> None:
    plan = plan_local(queue({"simple": {}}, storage={"replicas": 3, "port": 6000, "metricsPort": 7000}))
    units = plan.unit_configs("127.0.0.1:5")
    assert [unit.name for unit in units] == ["storage-0", "storage-1", "storage-2"]
    assert [unit.port for unit in units] == [6000, 6001, 6002]
    assert [unit.metrics_port for unit in units] == [7000, 7001, 7002]
    assert {tuple(unit.controller) for unit in units} == {("127.0.0.1:5",)}
    assert plan.controller.expected_units == 3


def test_nothing_listens_on_other_addresses_than_loopback() -> None:
    plan = plan_local(load(QUICKSTART))
    assert {plan.controller.host, *(unit.host for unit in plan.units)} == {"127.0.0.1"}


def test_simple_units_bound_the_rows_unless_sample_capacity_does() -> None:
    simple = {"simple": {"numUnits": 4, "unitSize": 100}}
    assert plan_local(queue(simple)).controller.sample_capacity == 400
    assert plan_local(queue(simple, controller={"sampleCapacity": 7})).controller.sample_capacity == 7
    assert plan_local(queue({"mooncake": {}})).controller.sample_capacity is None


def test_capacity_is_storage_capacity_or_the_segment() -> None:
    storage = {"capacity": "3Mi"}
    assert {unit.capacity for unit in plan_local(queue({"simple": {}}, storage=storage)).units} == {3 << 20}
    mooncake = {"mooncake": {"globalSegmentSize": "5Mi"}}
    assert {unit.capacity for unit in plan_local(queue(mooncake, storage=storage)).units} == {5 << 20}


def test_endpoints_of_a_started_master_reach_controller_and_units() -> None:
    plan = plan_local(load(QUICKSTART)).with_backend_settings({"masterServerAddress": "127.0.0.1:9"})
    for choice in (plan.controller.backend, *(unit.backend for unit in plan.units)):
        assert choice.kind == "mooncake"
        assert choice.settings["masterServerAddress"] == "127.0.0.1:9"
        assert choice.settings["protocol"] == "tcp"


@pytest.mark.parametrize(("policy", "protocol"), [("off", "tcp"), ("auto", "rdma")])
def test_the_rdma_policy_off_overrides_the_protocol(policy: str, protocol: str) -> None:
    plan = plan_local(queue({"mooncake": {"protocol": "rdma"}}, rdma={"policy": policy}))
    assert {unit.backend.settings["protocol"] for unit in plan.units} == {protocol}


def test_programs_attach_with_layout_and_pickle_of_the_resource() -> None:
    plan = plan_local(queue({"simple": {}}, layout="dense", security={"allowPickle": True}))
    attach = plan.attach_config("127.0.0.1:5").dump()
    assert attach == {
        "name": "q",
        "controller": {"addresses": ["127.0.0.1:5"]},
        "layout": "dense",
        "security": {"allowPickle": True},
    }


def test_tokens_of_a_secret_are_refused_with_what_to_do_instead() -> None:
    with pytest.raises(ConfigError, match=r"tokensSecret: there are no Secrets on one machine.*namespace: default"):
        plan_local(queue({"simple": {}}, security={"tokensSecret": "tokens"}))


def test_a_queue_without_storage_units_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"spec\.storage\.replicas: 0 storage units hold no rows"):
        plan_local(queue({"simple": {}}, storage={"replicas": 0}))


def test_another_backend_keeps_everything_else() -> None:
    quickstart = load(QUICKSTART)
    simple = with_backend(quickstart, "simple")
    assert simple.spec.backend.kind == "simple"
    assert plan_local(simple).master is None
    assert simple.spec.controller == quickstart.spec.controller
    assert with_backend(quickstart, "mooncake") is quickstart


def test_spill_goes_to_the_folder_that_the_resource_names() -> None:
    offload = {"path": "/disk", "thresholdBytes": "2Mi", "capacity": "5Gi"}
    plan = plan_local(queue({"simple": {"ssdOffload": offload}}))
    expected = {"enabled": True, "path": "/disk", "thresholdBytes": 2 << 20, "capacity": 5 << 30}
    assert {str(unit.backend.settings["ssdOffload"]) for unit in plan.units} == {str(expected)}


def test_spill_without_a_folder_is_refused_by_its_field() -> None:
    with pytest.raises(ConfigError, match=r"spec\.backend\.simple\.ssdOffload\.path: name a folder"):
        plan_local(queue({"simple": {"ssdOffload": {}}}))


@pytest.mark.parametrize(
    ("yuanrong", "settings"),
    [
        ({}, {"worker": "127.0.0.1:31501", "requestTimeout": 20}),
        ({"workerPort": 7, "requestTimeout": 3}, {"worker": "127.0.0.1:7", "requestTimeout": 3}),
        ({"worker": "head:9"}, {"worker": "head:9", "requestTimeout": 20}),
    ],
)
def test_yuanrong_uses_the_worker_that_the_resource_names(yuanrong: dict[str, Any], settings: dict[str, Any]) -> None:
    plan = plan_local(queue({"yuanrong": yuanrong}))
    assert plan.controller.backend.settings == settings
    assert all(unit.backend == plan.controller.backend for unit in plan.units)
    assert with_backend(load(QUICKSTART), "yuanrong").spec.backend.kind == "yuanrong"


def test_another_backend_is_refused_with_what_does_not_go_with_it() -> None:
    policy = [{"name": "a", "namespace": "n", "roles": ["consumer"]}]
    with pytest.raises(ConfigError, match=r"security\.policy needs backend simple"):
        with_backend(queue({"simple": {}}, security={"policy": policy}), "mooncake")


@pytest.mark.parametrize("kind", ["ray", "redis"])
def test_a_backend_that_cannot_run_here_is_refused_with_those_that_can(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf'"{kind}": supported values: "simple", "mooncake", "yuanrong"'):
        with_backend(load(QUICKSTART), kind)


def test_a_resource_for_ray_has_no_local_processes() -> None:
    with pytest.raises(
        ConfigError,
        match=r"spec\.backend.*ray.*actors of a Ray cluster.*ray\.init.*supported values: simple, mooncake, yuanrong",
    ):
        plan_local(queue({"ray": {}}))


def test_ports_above_the_last_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"storage unit 1 would need port 65536"):
        plan_local(queue({"simple": {}}, storage={"replicas": 2, "port": 65535}))


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ({"simple": {}}, r'spec\.storage\.capacity: "4096" is too small'),
        ({"mooncake": {"globalSegmentSize": 4096}}, r'spec\.backend\.mooncake\.globalSegmentSize: "4096" is too small'),
    ],
)
def test_a_storage_unit_too_small_to_start_is_refused_by_its_field(backend: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_local(queue(backend, storage={"capacity": 4096}))


def sharded(controller: dict[str, Any], **spec: Any) -> TransferQueue:
    return queue({"simple": {}}, controller={"shards": 3, **controller}, **spec)


def test_shards_get_consecutive_ports_and_share_out_the_rows() -> None:
    plan = plan_local(sharded({"port": 6000, "metricsPort": 7000, "sampleCapacity": 11}))
    controllers = plan.controllers([6000, 6001, 6002])
    addresses = ["127.0.0.1:6000", "127.0.0.1:6001", "127.0.0.1:6002"]
    assert [(one.shard, one.port, one.metrics_port, one.sample_capacity) for one in controllers] == [
        (0, 6000, 7000, 4),
        (1, 6001, 7001, 4),
        (2, 6002, 7002, 3),
    ]
    assert all(one.shards == addresses for one in controllers)
    assert all(unit.shards == unit.controller == addresses for unit in plan.unit_configs(*addresses))
    assert plan.attach_config(*addresses).controller.addresses == addresses


def test_one_controller_is_what_it_was_without_shards() -> None:
    plan = plan_local(queue({"simple": {}}))
    assert plan.controllers([1]) == [plan.controller]
    assert (plan.controller.shards, plan.unit_configs("127.0.0.1:1")[0].shards) == ([], [])


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (sharded({"port": 50069}), "spec.storage.port: port 50070 is one of spec.controller.port too"),
        (sharded({}, storage={"port": 65535}), "spec.storage.port: ports 65535 to 65536 are needed"),
    ],
    ids=["overlap", "too high"],
)
def test_ports_that_do_not_fit_several_controllers_are_refused(wanted: TransferQueue, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_local(wanted)
