"""Every setting of ``init(conf)`` takes effect, or is refused or warned of by its name."""

from __future__ import annotations

import contextlib
import importlib.resources
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.stack import Stack
from tests.integration.test_client_process import own_errors, run_python
from transfer_queue.compat.server_info import Role, ZMQServerInfo
from transfer_queue.config.init_settings import check_names, check_settings
from transfer_queue.errors import ConfigError, InvalidInputError, NotInitializedError, NotReadyError
from transfer_queue.launch.conf import merge_settings, plan_queue
from transfer_queue.sampler import GRPOGroupNSampler
from transfer_queue.storage.mooncake.testing import servers

SMALL = {"num_data_storage_units": 1, "unit_capacity": "16Mi"}
PACKAGED: Any = OmegaConf.to_container(
    OmegaConf.create(importlib.resources.files("transfer_queue").joinpath("config.yaml").read_text())
)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process without a queue, which a test may start one in."""
    monkeypatch.delenv("TQ_CONTROLLER_ADDRESS", raising=False)
    monkeypatch.delenv("TQ_CONFIG_FILE", raising=False)
    yield
    tq.close()


def nested(path: str, value: object) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


REFUSED = [
    ("layout", "square", '"jagged", "dense"'),
    ("metrics.enabled", "maybe", "of type boolean"),
    ("metrics.port", 70000, "from 0 to 65535"),
    ("controller.polling_mode", 3, "of type boolean"),
    ("controller.sampler", "NoSuchSampler", "Could not find sampler"),
    ("backend.storage_backend", "Nowhere", "Missing key"),
    ("backend.storage_backend", "RayStore", "needs Ray"),
    ("backend.storage_backend", "Yuanrong", "cannot be started by init"),
    ("backend.SimpleStorage.num_data_storage_units", 0, "from 1"),
    ("backend.SimpleStorage.total_storage_size", -5, "from 1"),
    ("backend.SimpleStorage.ssd_offload.enabled", "maybe", "of type boolean"),
    ("backend.SimpleStorage.ssd_offload", {"enabled": True}, "ssd_offload.path: name a folder"),
    ("backend.SimpleStorage.ssd_offload.threshold_bytes", -1, "from 0"),
    ("backend.MooncakeStore.offload.enabled", True, "not available"),
    ("backend.MooncakeStore.use_gdr", True, "not available"),
    ("backend.MooncakeStore.hard_pin", False, "never evicted"),
    ("backend.MooncakeStore.global_segment_size", "much", "not a quantity"),
    ("backend.SimpleStorage.unit_capacity", "lots", "not a quantity"),
    ("backend.SimpleStorage.unit_capacity", -1, "from 1048576"),
    ("backend.SimpleStorage", 5, "of type object"),
    ("backend", 5, "of type object"),
    ("controller", "here", "of type object"),
    ("controller.addresses", ["nowhere"], "host:port"),
]
REFUSED_MOONCAKE = [
    ("auto_init", {"metadata_server": "storehost:5000"}, "metadata_server.*another machine.*auto_init"),
    ("auto_init", {"master_server_address": "203.0.113.7:50051"}, "master_server_address.*another machine"),
    ("auto_init", {"master_server_address": "0.0.0.0:50051"}, "master_server_address.*no address to connect to"),
    ("auto_init", {"master_server_address": "[::]:50051"}, "master_server_address.*no address to connect to"),
    ("auto_init", {"master_server_address": "localhost"}, "master_server_address.*HOST:PORT"),
    ("attach", {"auto_init": False, "metadata_server": ""}, "metadata_server: name the server"),
    ("attach", {"auto_init": False, "master_server_address": None}, "master_server_address: name the server"),
]


@pytest.mark.parametrize(("path", "value", "text"), REFUSED, ids=[f"{path}={value}" for path, value, _ in REFUSED])
def test_a_setting_that_cannot_be_is_refused_by_its_name(alone: None, path: str, value: object, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        tq.init(nested(path, value))
    assert path in str(caught.value)
    assert isinstance(caught.value, tq.TransferQueueError)


def test_a_section_that_is_left_empty_is_that_of_the_defaults() -> None:
    empty: dict[str, Any] = {"metrics": None, "controller": None, "backend": {"SimpleStorage": None, "Yuanrong": None}}
    assert merge_settings(empty) == merge_settings({})


@pytest.mark.parametrize(("case", "section", "text"), REFUSED_MOONCAKE)
def test_a_mooncake_store_that_cannot_be_is_refused_by_its_setting(
    alone: None, case: str, section: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=rf"backend\.MooncakeStore\.{text}"):
        tq.init({"backend": {"storage_backend": "MooncakeStore", "MooncakeStore": section}})


@pytest.mark.parametrize(("name", "value"), [("start_timeout", 0), ("lifetime", "long"), ("namespaces", "mine")])
def test_the_section_ray_is_checked_where_there_is_no_ray_as_well(alone: None, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^ray: .*{name}"):
        tq.init({"ray": {name: value}})


def test_an_offload_without_a_folder_is_refused_before_anything_starts(alone: None) -> None:
    simple = {**SMALL, "ssd_offload": {"enabled": True}}
    with pytest.raises(ConfigError, match=r"ssd_offload\.path: name a folder"):
        tq.init({"backend": {"SimpleStorage": simple}})


def test_rows_beyond_memory_go_to_the_folder_of_ssd_offload(alone: None, tmp_path: Path) -> None:
    offload = {"enabled": True, "path": str(tmp_path / "spill"), "threshold_bytes": 0}
    tq.init({"backend": {"SimpleStorage": {**SMALL, "ssd_offload": offload}}})
    size = 4 << 20  # bytes; eight of them are twice the memory of the unit
    for number in range(8):
        tq.kv_put(str(number), "p", {"x": torch.full((size,), number, dtype=torch.uint8)})
    assert (tmp_path / "spill").is_dir()
    for number in range(8):
        row = tq.kv_batch_get(str(number), "p")["x"][0]
        assert (row.numel(), row.unique().tolist()) == (size, [number])


def test_a_mooncake_store_may_be_named_by_an_address_of_this_machine() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):  # without a route it stays on the loopback address
            probe.connect(("203.0.113.7", 9))  # sends nothing
        own = probe.getsockname()[0].replace("0.0.0.0", "127.0.0.1")
    addresses = {"metadata_server": f"{own}:0", "master_server_address": f"{own}:50051"}
    section = {"storage_backend": "MooncakeStore", "MooncakeStore": addresses}
    master = plan_queue(merge_settings({"backend": section})).master
    assert master is not None
    assert master.rpc_port == 50051


def test_init_starts_a_mooncake_store_of_its_own_and_uses_one_that_is_there(alone: None, tmp_path: Path) -> None:
    ports = {"metadata_server": "localhost:0", "master_server_address": "localhost:0"}
    small = {"global_segment_size": 64 << 20, "local_buffer_size": 16 << 20}
    one = {"SimpleStorage": SMALL, "storage_backend": "MooncakeStore"}
    tq.init({"backend": {**one, "MooncakeStore": {**small, **ports}}})
    tq.kv_batch_put(["a", "b"], "p", tensors(2))
    assert tq.kv_batch_get(["b"], "p")["x"].to_padded_tensor(0.0).tolist() == [[2.0, 3.0]]
    tq.close()
    with servers(tmp_path) as there:
        there_is = {
            "auto_init": False,
            "metadata_server": there["metadataServer"].removeprefix("http://").removesuffix("/metadata"),
            "master_server_address": there["masterServerAddress"],
        }
        tq.init({"backend": {**one, "MooncakeStore": {**small, **there_is}}})
        tq.kv_batch_put(["a"], "p", tensors(1))
        assert tq.kv_batch_get(["a"], "p")["x"].to_padded_tensor(0.0).tolist() == [[0.0, 1.0]]
        tq.close()


def test_an_unknown_backend_is_a_missing_key_as_it_was(alone: None) -> None:
    with pytest.raises(KeyError, match="Missing key"):
        tq.init({"backend": {"storage_backend": "Nowhere"}})


def test_a_sampler_of_a_wrong_type_is_refused_before_anything_starts(alone: None) -> None:
    conf = OmegaConf.create({"controller": {"sampler": int}}, flags={"allow_objects": True})
    with pytest.raises(TypeError, match=r"controller\.sampler"):
        tq.init(conf)


@pytest.mark.parametrize("name", ["required_node_resource", "zmq_info", "storage_unit_infos"])
def test_a_setting_without_effect_is_warned_of_by_its_name(name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name} has no effect"):
        check_settings(nested(f"backend.SimpleStorage.{name}", "gpu"), PACKAGED)


def test_a_required_resource_of_nodes_is_taken_as_it_is_in_a_ray_cluster(recwarn: pytest.WarningsRecorder) -> None:
    check_settings(nested("backend.SimpleStorage.required_node_resource", "gpu"), PACKAGED, in_ray=True)
    assert [str(each.message) for each in recwarn] == []


def test_what_configurations_of_earlier_releases_have_is_kept_and_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"enable": True, "backend": {"Yuanrong": {"etcd_address": "127.0.0.1:2379"}}}  # verl; 0.1.6
    check_names(given, lambda name: False)
    check_settings(given, PACKAGED)
    named = [record.getMessage().split(" is a setting")[0] for record in caplog.records]
    assert named == ["conf: enable", "conf: backend.Yuanrong.etcd_address"]


@pytest.mark.parametrize(
    ("conf", "text"),
    [
        ({"security": {"allowPickle": False}}, r"security\.allowPickle: .*controller\.addresses.*spec\.security\."),
        ({"backend": {"mooncake": {}}}, r'spec\.backend\.mooncake of .*backend\.storage_backend: "MooncakeStore"'),
        (
            {"spec": {"layout": "dense"}},
            r"spec\.layout of a TransferQueue resource .*; init\(\) has layout",
        ),
        ({"storage": {"replicas": 4}}, r"spec\.storage\.replicas of .*SimpleStorage\.num_data_storage_units$"),
        ({"sampler": "GRPOGroupNSampler"}, r"^sampler: .* where it is controller\.sampler$"),
        ({"controller": {"durability": "process"}}, r"it is spec\.controller\.durability of .*tq up -f"),
        ({"controller": {"port": 99999}}, r"it is spec\.controller\.port of .*tq up -f"),
        ({"unit_capacity": "1Gi"}, r"where it is backend\.SimpleStorage\.unit_capacity$"),
        ({"backend": {"SimpleStorage": {"capacity": "1Gi"}}}, r"init\(\) has backend\.SimpleStorage\.unit_capacity$"),
        ({"backend": {"RayStore": {"kind": "nixl", "x": 1}}}, r"RayStore\.kind"),
        ({"trainer": {"own": 1}}, r"^trainer: unknown setting; there are: backend, controller, layout"),
    ],
)
def test_a_setting_without_effect_is_refused_with_where_it_belongs(
    alone: None, conf: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        tq.init(conf)


def test_the_section_of_a_backend_of_the_program_is_its_own() -> None:
    check_names({"backend": {"OwnStore": {"url": 1}, "Other": 1}}, {"OwnStore", "Other"}.__contains__)
    check_names({"backend": {"storage_backend": "Own", "Own": {"url": 1}}}, lambda name: False)


def test_every_setting_at_its_default_passes_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    check_settings(PACKAGED, PACKAGED)
    assert caplog.records == []


def test_settings_take_effect_and_let_another_process_attach(alone: None) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    conf = OmegaConf.create(
        {
            "layout": "dense",
            "metrics": {"enabled": True, "port": port},
            "controller": {"sampler": GRPOGroupNSampler(2), "polling_mode": True},
            "backend": {"SimpleStorage": {**SMALL, "num_data_storage_units": 2, "total_storage_size": 6}},
        },
        flags={"allow_objects": True},
    )
    merged = tq.init(conf)
    assert isinstance(merged, DictConfig)
    assert merged.metrics.endpoint == tq.get_metrics_endpoint() == f"127.0.0.1:{port}"
    with urllib.request.urlopen(f"http://{merged.metrics.endpoint}/metrics", timeout=30) as answer:
        assert b"tq_clients_connected" in answer.read()
    assert isinstance(merged.controller.zmq_info, ZMQServerInfo)
    assert merged.controller.zmq_info.role is Role.CONTROLLER
    assert sorted(merged.backend.SimpleStorage.zmq_info) == ["storage-0", "storage-1"]

    tq.kv_batch_put(["a", "b"], "p", tensors(2))
    assert tq.kv_batch_get(["a", "b"], "p")["x"].tolist() == [[0.0, 1.0], [2.0, 3.0]]  # dense
    client = tq.get_client()
    assert client.get_meta(["x"], 4, "p", task_name="t").size == 0  # polling: at once
    with pytest.raises(RuntimeError, match="multiple of n_samples_per_prompt"):
        client.get_meta(["x"], 3, "p", task_name="t")
    assert client.get_meta(["x"], 2, "p", task_name="t").global_indexes == [0, 1]
    with pytest.raises(RuntimeError, match="capacity"):
        tq.kv_batch_put([str(number) for number in range(5)], "p", tensors(5))

    elsewhere = f"""
import transfer_queue as tq
from transfer_queue.utils.zmq_utils import ZMQServerInfo
conf = {{"layout": "dense", "security": {{"allowPickle": True}}, "controller": {{"zmq_info": {info_code(merged)}}}}}
assert tq.init(conf) is conf
assert tq.get_metrics_endpoint() == "127.0.0.1:{port}"
assert tq.kv_batch_get("b", "p")["x"].tolist() == [[2.0, 3.0]]
"""
    result = run_python(elsewhere)
    assert (result.returncode, own_errors(result)) == (0, [])


def info_code(merged: DictConfig) -> str:
    info = merged.controller.zmq_info
    return f"ZMQServerInfo({str(info.role)!r}, {info.id!r}, {info.ip!r}, {info.ports!r})"


def tensors(rows: int) -> Any:
    from tensordict import TensorDict

    return TensorDict({"x": torch.arange(2.0 * rows).reshape(rows, 2)}, batch_size=[rows])


def test_metrics_are_off_unless_they_are_asked_for(alone: None) -> None:
    assert tq.get_metrics_endpoint() is None
    merged = tq.init({"backend": {"SimpleStorage": SMALL}})
    assert merged is not None
    assert "endpoint" not in merged.metrics
    assert tq.get_metrics_endpoint() is None
    tq.close()
    assert tq.get_metrics_endpoint() is None


def test_a_process_that_never_called_init_finds_the_metrics_of_a_running_queue(stack: Stack) -> None:
    code = "import transfer_queue as tq; print(tq.get_metrics_endpoint())"
    assert run_python(code, stack).stdout.strip() == stack.controller.ready["metrics"]


def test_the_variables_of_earlier_releases_are_tolerated(
    queue: Stack, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = ["TQ_NUM_THREADS", "TQ_PRE_ALLOC_SAMPLE_NUM", "TQ_CLIENT_ZMQ_IO_THREADS", "TQ_CONTROLLER_ZMQ_MAX_SOCKETS"]
    others = {"TQ_ZERO_COPY_SERIALIZATION": "True", "TQ_UNKNOWN": "?", "MC_GID_INDEX": "3", "MC_STORE_MEMCPY": "0"}
    addresses = {"LOCAL_IP": "127.0.0.1", "HEAD_IP": "h", "MC_TCP_BIND_ADDRESS": "127.0.0.1", "TQ_MC_RPC_PORT": "1"}
    for name, value in (dict.fromkeys(counts, "4") | others | addresses | {"TQ_LOGGING_LEVEL": "WARN"}).items():
        monkeypatch.setenv(name, value)
    client = tq.TransferQueueClient("other", queue.address)
    meta = client.put(tensors(2), partition_id=partition)
    assert client.get_data(meta)["x"].values().tolist() == [0.0, 1.0, 2.0, 3.0]
    client.close()


def test_the_layout_can_be_chosen_from_outside(queue: Stack, partition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = tq.get_client().put(tensors(2), partition_id=partition)
    nested = {}
    for layout in ("dense", "jagged"):
        monkeypatch.setenv("TQ_LAYOUT", layout)
        client = tq.TransferQueueClient("other", queue.address)
        nested[layout] = client.get_data(meta)["x"].is_nested
        client.close()
    assert nested == {"dense": False, "jagged": True}
    monkeypatch.setenv("TQ_LAYOUT", "square")
    with pytest.raises(ValueError, match="TQ_LAYOUT"):
        tq.TransferQueueClient("other", queue.address)


def test_a_field_that_rows_lack_is_an_error_or_dropped_as_in_earlier_releases(
    queue: Stack, partition: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tq.kv_batch_put(["a", "b"], partition, TensorDict({"tokens": torch.ones(2, 3), "reward": torch.ones(2)}, [2]))
    tq.kv_put("a", partition, {"old_log_probs": torch.ones(1)})

    def ask(fields: list[str] | None) -> TensorDict:
        client = tq.TransferQueueClient("other", queue.address)
        try:
            return client.run(client.kv.get, ["a", "b"], partition, fields)
        finally:
            client.close()

    with pytest.raises(NotReadyError, match=r"fields \['tokns', 'rewards'\].*did you mean 'tokens' and 'reward'\?"):
        ask(["tokns", "rewards", "tokens"])
    with pytest.raises(NotReadyError, match=r"'old_log_probs' is not ready for keys \['b'\]"):
        ask(["tokens", "old_log_probs"])
    with pytest.raises(
        NotReadyError, match=r"'old_log_probs' is not ready for keys \['b'\].*; name the fields to read"
    ):
        ask(None)
    monkeypatch.setenv("TQ_MISSING_FIELDS", "drop")
    assert sorted(ask(None).keys()) == ["reward", "tokens"]
    found = ask(["tokens", "old_log_probs", "values"])
    assert list(found.keys()) == ["tokens"]
    assert found.batch_size == torch.Size([2])
    assert ask([]).batch_size == torch.Size([0])
    assert "['old_log_probs', 'values'] are left out" in caplog.text
    monkeypatch.setenv("TQ_MISSING_FIELDS", "ignore")
    with pytest.raises(ValueError, match="TQ_MISSING_FIELDS"):
        ask(["tokens"])


def test_the_manager_call_of_earlier_releases_chooses_their_answer_to_a_missing_field(
    queue: Stack, partition: str
) -> None:
    tq.kv_put("a", partition, {"x": torch.ones(1)})
    client = tq.TransferQueueClient("other", queue.address)
    client.initialize_storage_manager("SimpleStorage", {"zmq_info": {}})
    assert list(client.run(client.kv.get, "a", partition, ["x", "values"]).keys()) == ["x"]
    client.close()


def test_a_column_that_became_a_list_is_told_with_its_dtypes(
    queue: Stack, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    tq.kv_batch_put(["a", "b"], partition, TensorDict({"odd": torch.ones(2, 3)}, [2]))
    tq.kv_put("c", partition, {"odd": torch.ones(3, dtype=torch.int64)})
    assert len(tq.kv_batch_get(["a", "b", "c"], partition)["odd"]) == 3
    assert len(tq.kv_batch_get(["a", "b", "c"], partition)["odd"]) == 3
    (line,) = (record.getMessage() for record in caplog.records if "'odd'" in record.getMessage())
    assert "float32 tensors of rank 1 (row 0 of the batch) and int64 tensors of rank 1 (row 2 of the batch)" in line


def test_a_call_and_a_program_can_choose_the_layout(queue: Stack, partition: str) -> None:
    tq.kv_batch_put(["a", "b"], partition, tensors(2))
    meta = tq.get_client().get_meta(["x"], partition_id=partition, mode="force_fetch")
    dense = [
        tq.kv_batch_get(["a", "b"], partition, layout="dense"),
        tq.get_client().get_data(meta, layout="dense"),
        tq.kv_batch_get_by_meta(tq.KVBatchMeta(["a", "b"], [{}, {}], partition, ["x"]), layout="dense"),
    ]
    assert [batch["x"].shape for batch in dense] == [torch.Size([2, 2])] * 3
    assert tq.kv_batch_get(["a", "b"], partition)["x"].is_nested
    with pytest.raises(InvalidInputError, match="layout"):
        tq.kv_batch_get("a", partition, layout="square")  # type: ignore[arg-type]
    script = (
        "import transfer_queue as tq\n"
        "tq.init({'layout': 'dense'})\n"
        f"assert not tq.kv_batch_get(['a', 'b'], {partition!r})['x'].is_nested\n"
        f"assert tq.kv_batch_get(['a', 'b'], {partition!r}, layout='jagged')['x'].is_nested\n"
    )
    done = run_python(script, queue)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("conf", "text"),
    [
        ({"controler": {"sampler": "GRPOGroupNSampler"}}, r"controler: unknown setting; did you mean controller\?"),
        ({"address": "127.0.0.1:1"}, r'address: unknown setting; controller\.addresses names a queue: \["host:port"\]'),
        ({"controller": {"address": "127.0.0.1:1"}}, r"controller\.address: unknown setting"),
        ({"bakend": {}}, r"bakend: .*did you mean backend\?"),
        ({"controller": {"samplr": "GRPOGroupNSampler"}}, r"controller\.samplr: .*did you mean controller\.sampler\?"),
        ({"backend": {"SimpleStorag": SMALL}}, r"did you mean backend\.SimpleStorage\?"),
        (
            {"backend": {"SimpleStorage": {"unit_capcity": "1Gi"}}},
            r"backend\.SimpleStorage\.unit_capcity: .*unit_capacity\?",
        ),
        (
            {"apiVersion": "transferqueue.io/v1alpha1", "kind": "TransferQueue", "spec": {}},
            "whole TransferQueue res.*tq up",
        ),
        ({"securty": {}, "controller": {"addresses": ["127.0.0.1:1"]}}, r"did you mean security\?"),
        (
            {"controller": {"sampler": {"nam": "GRPOGroupNSampler"}}},
            r'controller\.sampler: unknown field "nam"; did you mean name\?',
        ),
    ],
)
@pytest.mark.parametrize("form", [dict, OmegaConf.create])
def test_a_name_near_to_a_setting_and_a_whole_resource_are_refused(
    alone: None, conf: dict[str, Any], text: str, form: Any
) -> None:
    with pytest.raises(ConfigError, match=text):
        tq.init(form(conf))
    with pytest.raises(NotInitializedError):
        tq.get_client()


@pytest.mark.parametrize("form", [dict, OmegaConf.create])
def test_a_sampler_may_be_a_name_and_arguments(form: Any) -> None:
    given = {"name": "GRPOGroupNSampler", "args": {"n_samples_per_prompt": 3}}
    merged = merge_settings(form({"controller": {"sampler": given}}))
    chosen = plan_queue(merged).controller.sampler
    assert (chosen.name, chosen.args, chosen.pickled) == ("GRPOGroupNSampler", {"n_samples_per_prompt": 3}, None)
