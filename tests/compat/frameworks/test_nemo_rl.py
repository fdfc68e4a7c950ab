"""The calls of NeMo-RL, which is written for 0.1.9: settings from the packaged file, KV verbs, metrics, a bootstrap."""

from __future__ import annotations

import importlib.resources
import urllib.request
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider

import transfer_queue as tq
from tests.integration.stack import Stack
from transfer_queue.compat.actor_class import with_this_release


def test_a_queue_started_from_the_packaged_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MC_GID_INDEX": "3", "MC_STORE_MEMCPY": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TQ_CONTROLLER_ADDRESS", raising=False)
    packaged = importlib.resources.files("transfer_queue").joinpath("config.yaml").read_text()
    conf: Any = OmegaConf.create(packaged)
    conf.backend.storage_backend = "SimpleStorage"
    conf.backend.SimpleStorage.num_data_storage_units = 1
    conf.backend.SimpleStorage.unit_capacity = "16Mi"
    conf.metrics.enabled = True
    merged = tq.init(conf)
    try:
        assert merged is not None
        endpoint = tq.get_metrics_endpoint()
        assert endpoint == merged.metrics.endpoint
        with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=30) as answer:
            assert answer.status == 200
        rollout_and_training("step_0")
    finally:
        tq.close()
        tq.close()


def test_the_same_calls_on_a_queue_that_is_there(queue: Stack, partition: str) -> None:
    rollout_and_training(partition)


def rollout_and_training(partition: str) -> None:
    keys = [f"{partition}/{number}" for number in range(4)]
    lengths = [2, 5, 1, 3]
    ids = torch.nested.as_nested_tensor([torch.arange(length) for length in lengths], layout=torch.jagged)
    data = TensorDict(
        {
            "input_ids": ids,
            "input_lengths": torch.tensor(lengths),
            "total_reward": torch.tensor([0.0, 1.0, 0.0, 1.0]),
            "message_log": NonTensorStack(*[[{"role": "user", "content": key}] for key in keys]),
        },
        [4],
    )
    tq.kv_batch_put(keys, partition, data, tags=[{"weight_version": 3}] * 4)
    assert tq.kv_list(partition)[partition] == {key: {"weight_version": 3} for key in keys}
    for rank in range(2):
        mine = keys[rank::2]
        got = tq.kv_batch_get(mine, partition, ["input_ids", "input_lengths"])
        assert set(got.keys()) == {"input_ids", "input_lengths"}
        assert got["input_ids"].offsets().diff().tolist() == got["input_lengths"].tolist() == lengths[rank::2]
        logprobs = torch.nested.nested_tensor_from_jagged(
            got["input_ids"].values().float().neg(), got["input_ids"].offsets()
        )
        meta = tq.kv_batch_put(mine, partition, TensorDict({"prev_logprobs": logprobs}, [2]))
        assert meta.fields == ["input_ids", "input_lengths", "message_log", "prev_logprobs", "total_reward"]
    final = tq.kv_batch_get(keys, partition)
    assert [row.tolist() for row in final["prev_logprobs"].unbind()][3] == [0.0, -1.0, -2.0]
    assert final["message_log"].tolist()[1] == [{"role": "user", "content": keys[1]}]
    assert final["total_reward"].tolist() == [0.0, 1.0, 0.0, 1.0]
    tq.kv_clear(keys, partition)
    with pytest.raises(ValueError, match="not found"):
        tq.kv_batch_get(keys, partition)


def test_a_bootstrap_of_a_plugin_is_registered_and_the_backend_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TQ_CONTROLLER_ADDRESS", raising=False)

    @StorageBootstrapProvider.register_provider("OwnStore")
    def start(conf: Any) -> list[Any]:
        raise AssertionError("not reached")

    assert StorageBootstrapProvider.get_provider("ownstore") is start
    with pytest.raises(ValueError, match=r"backend\.storage_backend.*OwnStore"):
        tq.init({"backend": {"storage_backend": "OwnStore", "OwnStore": {}}})


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"pip": ["TransferQueue @ git+https://example.com/TransferQueue.git@c516143"]}, None),
        ({"pip": ["transferqueue[ray]==0.1.9", "transferqueue-tools"]}, {"pip": ["transferqueue-tools"]}),
        ({"uv": {"packages": ["TransferQueue"]}, "env_vars": {"A": "1"}}, {"env_vars": {"A": "1"}}),
        ({"pip": {"packages": ["numpy", "TransferQueue>=0.1.8"]}}, {"pip": {"packages": ["numpy"]}}),
        ({"pip": "requirements.txt"}, {"pip": "requirements.txt"}),
        (None, None),
    ],
)
def test_actors_install_no_other_release_of_this_package(given: Any, kept: Any) -> None:
    expected = {"num_cpus": 1} if kept is None else {"num_cpus": 1, "runtime_env": kept}
    assert with_this_release({"num_cpus": 1, "runtime_env": given}) == expected
