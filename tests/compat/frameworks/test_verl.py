"""The calls of verl 0.8 and later and of verl-omni: agent loops with tags as state, workers that read by metadata."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from tests.integration.stack import Stack
from transfer_queue.metadata import BatchMeta, KVBatchMeta

LENGTHS = [3, 1, 4, 2]
KEYS = [f"prompt{number}_0_0" for number in range(4)]


def tokens(number: int) -> torch.Tensor:
    return torch.arange(LENGTHS[number]) + 10 * number


async def agent_loop(number: int, partition: str) -> None:
    """One trajectory: announced by a tag, filled, then finished by another tag."""
    key = KEYS[number]
    await tq.async_kv_put(key, partition, tag={"status": "running", "global_steps": 1})
    fields = {"responses": tokens(number), "response_mask": torch.ones(LENGTHS[number], dtype=torch.int64), "uid": key}
    await tq.async_kv_put(key, partition, fields, tag={"status": "finished", "seq_len": LENGTHS[number]})


def test_a_step_of_verl(queue: Stack, partition: str) -> None:
    assert tq.init() is None  # a queue is there: nothing is started

    async def rollout() -> None:
        await asyncio.gather(*(agent_loop(number, partition) for number in range(4)))

    asyncio.run(rollout())
    listed = tq.kv_list(partition_id=partition)[partition]
    finished = [key for key, tag in listed.items() if tag["status"] == "finished"]
    assert sorted(finished) == KEYS
    assert listed[KEYS[2]] == {"status": "finished", "global_steps": 1, "seq_len": 4}

    meta = KVBatchMeta(
        keys=KEYS, tags=[listed[key] for key in KEYS], partition_id=partition, fields=["responses", "uid"]
    )
    meta.reorder([2, 0, 1, 3])
    halves = meta.chunk(2)
    assert [half.keys for half in halves] == [[KEYS[2], KEYS[0]], [KEYS[1], KEYS[3]]]
    assert KVBatchMeta.concat(halves) == meta

    read = tq.kv_batch_get_by_meta(halves[0])
    assert set(read.keys()) == {"responses", "uid"}
    assert read["responses"].is_nested
    assert [row.tolist() for row in read["responses"].unbind()] == [tokens(2).tolist(), tokens(0).tolist()]
    assert read["responses"].offsets().diff().tolist() == [4, 3]
    assert read["responses"].to_padded_tensor(-1).tolist() == [[20, 21, 22, 23], [0, 1, 2, -1]]
    assert read.pop("uid").tolist() == [KEYS[2], KEYS[0]]


def test_workers_of_verl_add_columns_that_come_back_as_jagged(queue: Stack, partition: str) -> None:
    """Log probabilities per token stay ragged; uniform columns of two dimensions are nested too, of one are dense."""
    ragged = torch.nested.as_nested_tensor([tokens(number) for number in range(4)], layout=torch.jagged)
    put = tq.kv_batch_put(KEYS, partition, TensorDict({"responses": ragged}, [4]), tags=[{"i": i} for i in range(4)])
    assert (put.fields, put.size, put.extra_info) == (["responses"], 4, {})

    read = tq.kv_batch_get_by_meta(put, select_fields=["responses"])
    values = read["responses"].values().double() / 2
    log_probs = torch.nested.nested_tensor_from_jagged(values, read["responses"].offsets())
    more = TensorDict(
        {
            "old_log_probs": log_probs,
            "scores": torch.tensor([0.5, 1.0, 1.5, 2.0]),
            "position": torch.arange(8).view(4, 2),
        },
        [4],
    )
    put = tq.kv_batch_put(put.keys, partition, more)
    assert put.fields == ["old_log_probs", "position", "responses", "scores"]
    assert put.tags == [{"i": 0}, {"i": 1}, {"i": 2}, {"i": 3}]

    back = tq.kv_batch_get([KEYS[3], KEYS[1], KEYS[3]], partition)
    assert back.batch_size == torch.Size([3])
    assert back["old_log_probs"].dtype is torch.float64
    assert [row.tolist() for row in back["old_log_probs"].unbind()] == [[15.0, 15.5], [5.0], [15.0, 15.5]]
    assert back["scores"].tolist() == [2.0, 1.0, 2.0]
    assert back["position"].is_nested
    assert back["position"].to_padded_tensor(0).tolist() == [[6, 7], [2, 3], [6, 7]]
    assert back[0]["scores"].item() == 2.0
    tq.kv_clear(KEYS, partition)
    assert tq.kv_list(partition) == {partition: {}}


def test_verl_makes_metadata_without_rows_and_marks_rows_ready_after_transport() -> None:
    empty = BatchMeta()
    assert (empty.size, empty.is_ready, empty.field_names) == (0, False, [])
    meta = BatchMeta([1, 2], ["p", "p"])
    meta.production_status[:] = 1
    meta.extra_info["temperature"] = 0.5
    assert meta.is_ready
    assert meta.get_extra_info("temperature") == 0.5


def test_a_missing_key_is_an_error_not_fewer_rows(queue: Stack, partition: str) -> None:
    tq.kv_put("a", partition, {"x": torch.ones(2)})
    with pytest.raises(ValueError, match=r"'b'.*not found"):
        tq.kv_batch_get(["a", "b"], partition)


def test_verl_omni_columns_of_all_modalities(queue: Stack, partition: str) -> None:
    """Images and latents of 4 dimensions, grids in dicts, texts and holes, added to rows in any order."""
    images = torch.arange(2 * 3 * 2 * 2, dtype=torch.uint8).view(2, 3, 2, 2)
    extras: list[Any] = [{"grid": torch.tensor([1, 2]), "fps": 2.0}, None]
    tq.kv_batch_put(["b", "a"], partition, TensorDict({"images": images}, [2]))
    texts = TensorDict({"prompt": NonTensorStack("first", "second"), "inputs": NonTensorStack(*extras)}, [2])
    tq.kv_batch_put(["a", "b"], partition, texts, tags=[{"modality": "image"}, {"modality": "video"}])
    audio = torch.nested.as_nested_tensor([torch.ones(2, 4), torch.zeros(5, 4)], layout=torch.jagged)
    tq.kv_batch_put(["a", "b"], partition, TensorDict({"audio": audio}, [2]))

    got = tq.kv_batch_get(["a", "b"], partition)
    assert [row.tolist() for row in got["images"].unbind()] == [images[1].tolist(), images[0].tolist()]
    assert got["images"].dtype is torch.uint8
    assert list(got["prompt"]) == ["first", "second"]
    inputs = got["inputs"].tolist()
    assert inputs[1] is None
    assert (inputs[0]["grid"].tolist(), inputs[0]["fps"]) == ([1, 2], 2.0)
    assert [tuple(row.shape) for row in got["audio"].unbind()] == [(2, 4), (5, 4)]
    assert tq.kv_list(partition)[partition] == {"b": {"modality": "video"}, "a": {"modality": "image"}}


def test_both_frameworks_ask_for_a_version_with_checkpoints() -> None:
    numbers = tuple(int(part) for part in tq.__version__.split(".")[:3])
    assert numbers >= (0, 1, 9)
