"""The input tables of the key-value interface: which arguments are refused, with which error and text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import transfer_queue as tq
from tests.integration.stack import Stack
from tests.waiting import wait_until


def batch(rows: int = 2, **fields: Any) -> TensorDict:
    return TensorDict(fields or {"x": torch.zeros(rows, 3)}, batch_size=[rows])


Call = tuple[str, dict[str, Any]]
PUT_ERRORS: list[tuple[str, Call, type[Exception], str]] = [
    ("nothing to put", ("kv_batch_put", {"keys": ["a"]}), ValueError, "at least one parameter"),
    ("nothing to put, one key", ("kv_put", {"key": "a"}), ValueError, "at least one parameter"),
    ("no keys", ("kv_batch_put", {"keys": [], "tags": []}), ValueError, "empty list"),
    ("key is not a string", ("kv_batch_put", {"keys": ["a", 1], "fields": batch()}), TypeError, "strings"),
    ("keys are a tuple", ("kv_batch_put", {"keys": ("a", "b"), "fields": batch()}), TypeError, "strings"),
    ("one key is not a string", ("kv_put", {"key": 7, "tag": {}}), TypeError, "strings"),
    ("fewer keys than rows", ("kv_batch_put", {"keys": ["a"], "fields": batch()}), ValueError, "does not match"),
    (
        "fewer tags than keys",
        ("kv_batch_put", {"keys": ["a", "b"], "fields": batch(), "tags": [{}]}),
        ValueError,
        "does not match",
    ),
    ("a key twice", ("kv_batch_put", {"keys": ["a", "a"], "fields": batch()}), ValueError, "Got duplicated keys"),
    (
        "nested tensor as one row",
        ("kv_put", {"key": "a", "fields": {"x": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)}}),
        ValueError,
        "kv_batch_put",
    ),
    ("fields of another type", ("kv_put", {"key": "a", "fields": [1]}), ValueError, "dict or TensorDict"),
    (
        "batch-level non-tensor",
        ("kv_batch_put", {"keys": ["a", "b"], "fields": batch(x=NonTensorData("v", batch_size=[2]))}),
        TypeError,
        "x",
    ),
    (
        "nested TensorDict",
        ("kv_batch_put", {"keys": ["a", "b"], "fields": batch(x=batch())}),
        RuntimeError,
        "x",
    ),
    (
        "over capacity",
        ("kv_batch_put", {"keys": ["a", "b"], "fields": batch(x=torch.zeros(2, 40_000_000))}),
        RuntimeError,
        "capacity",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), [case[1:] for case in PUT_ERRORS], ids=[c[0] for c in PUT_ERRORS])
@pytest.mark.parametrize("twin", ["sync", "async"])
def test_a_refused_put_names_the_reason_and_leaves_no_trace(
    queue: Stack, partition: str, call: Call, error: type[Exception], text: str, twin: str
) -> None:
    with pytest.raises(error, match=re.escape(text)) as caught:
        invoke(twin, call[0], partition_id=partition, **call[1])
    assert isinstance(caught.value, tq.TransferQueueError)
    assert tq.kv_list(partition) == {}


GET_ERRORS: list[tuple[str, Callable[[str], Call], type[Exception], str]] = [
    ("no key exists", lambda p: ("kv_batch_get", {"keys": ["z"], "partition_id": p}), ValueError, "not found"),
    ("no partition", lambda p: ("kv_batch_get", {"keys": ["a"], "partition_id": p + "?"}), ValueError, "not found"),
    ("some keys missing", lambda p: ("kv_batch_get", {"keys": ["a", "z"], "partition_id": p}), ValueError, "'z'"),
    ("key without data", lambda p: ("kv_batch_get", {"keys": "bare", "partition_id": p}), ValueError, "not ready"),
    (
        "one key without data",
        lambda p: ("kv_batch_get", {"keys": ["a", "bare"], "partition_id": p}),
        ValueError,
        "not ready",
    ),
    ("no keys", lambda p: ("kv_batch_get", {"keys": [], "partition_id": p}), ValueError, "empty list"),
    ("key is not a string", lambda p: ("kv_batch_get", {"keys": [1], "partition_id": p}), TypeError, "strings"),
    ("keys are a tuple", lambda p: ("kv_batch_get", {"keys": ("a",), "partition_id": p}), TypeError, "strings"),
    ("clear no keys", lambda p: ("kv_clear", {"keys": [], "partition_id": p}), ValueError, "empty list"),
    ("clear a number", lambda p: ("kv_clear", {"keys": [1], "partition_id": p}), TypeError, "strings"),
    (
        "meta without partition",
        lambda p: ("kv_batch_get_by_meta", {"meta": tq.KVBatchMeta(keys=["a"], tags=[{}])}),
        ValueError,
        "partition_id",
    ),
    (
        "field that the meta lacks",
        lambda p: (
            "kv_batch_get_by_meta",
            {"meta": tq.KVBatchMeta(["a"], [{}], p, ["x"]), "select_fields": ["y"]},
        ),
        ValueError,
        "select_fields",
    ),
    (
        "select from a meta without fields",
        lambda p: ("kv_batch_get_by_meta", {"meta": tq.KVBatchMeta(["a"], [{}], p), "select_fields": "x"}),
        ValueError,
        "select_fields",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), [case[1:] for case in GET_ERRORS], ids=[c[0] for c in GET_ERRORS])
@pytest.mark.parametrize("twin", ["sync", "async"])
def test_a_refused_get_or_clear_names_the_reason(
    queue: Stack, partition: str, call: Callable[[str], Call], error: type[Exception], text: str, twin: str
) -> None:
    tq.kv_put("a", partition, {"x": torch.ones(2)})
    tq.kv_put("bare", partition, tag={"n": 1})
    name, arguments = call(partition)
    with pytest.raises(error, match=text):
        invoke(twin, name, **arguments)
    assert list(tq.kv_list(partition)[partition]) == ["a", "bare"]


def test_puts_upsert_and_merge_tags_shallowly(queue: Stack, partition: str) -> None:
    tq.kv_batch_put(["a", "b"], partition, batch(x=torch.tensor([1, 2])), [{"n": {"p": 1}, "k": 0}, {}])
    meta = tq.kv_batch_put(["b", "a"], partition, batch(y=torch.tensor([20, 10])), [{}, {"n": {"q": 2}}])
    assert (meta.keys, meta.fields, meta.partition_id) == (["b", "a"], ["x", "y"], partition)
    assert meta.tags == [{}, {"n": {"q": 2}, "k": 0}]
    got = tq.kv_batch_get(["a", "b", "a"], partition)
    assert got.batch_size == torch.Size([3])
    assert got["x"].tolist() == [1, 2, 1]
    assert got["y"].tolist() == [10, 20, 10]
    tq.kv_put("a", partition, {"x": torch.tensor(5)})
    assert tq.kv_batch_get("a", partition, "x")["x"].tolist() == [5]
    assert tq.kv_list(partition) == {partition: {"a": {"n": {"q": 2}, "k": 0}, "b": {}}}


def test_a_list_of_numbers_is_a_tensor_as_in_a_tensordict(queue: Stack, partition: str) -> None:
    columns = {"float": [1.0, 0.5], "mixed": [1, 2.5], "int": [1, 2], "bool": [True, False]}
    kept = {"big": [1, 2**70], "none": [1, None], "flag or int": [True, 2], "text": ["a", "b"], "lists": [[1], [2]]}
    tq.kv_batch_put(["a", "b"], partition, {**columns, **kept})
    by_index = tq.get_client().put({**columns, **kept}, partition_id=f"{partition}-rows")
    for got in (tq.kv_batch_get(["a", "b"], partition), tq.get_client().get_data(by_index)):
        made = TensorDict(columns, [2])
        for name in columns:
            assert got[name].dtype == made[name].dtype
            assert got[name].tolist() == made[name].tolist()
        assert {name: list(got[name]) for name in kept} == kept
    tq.kv_put("a", f"{partition}-one", {"reward": 1.0, "array": np.ones(2)})
    one = tq.kv_batch_get("a", f"{partition}-one")
    assert one["reward"][0] == 1.0
    assert isinstance(one["array"][0], np.ndarray)


def test_a_row_without_data_is_made_by_a_tag_and_not_by_empty_fields(queue: Stack, partition: str) -> None:
    for fields in ({}, TensorDict({}, [1])):
        with pytest.raises(ValueError, match="fields is empty"):
            tq.kv_put("a", partition, fields)
        with pytest.raises(ValueError, match="fields is empty"):
            tq.kv_batch_put(["a"], partition, fields)
    assert tq.kv_put("a", partition, {}, tag={}).fields == []
    tq.kv_put("b", partition, tag={})
    assert tq.kv_list(partition) == {partition: {"a": {}, "b": {}}}


def test_clear_ignores_what_is_missing_and_keeps_the_partition(queue: Stack, partition: str) -> None:
    tq.kv_batch_put(["a", "b"], partition, batch(x=torch.tensor([1, 2])))
    tq.kv_clear(["a", "never"], partition)
    tq.kv_clear("a", partition)
    tq.kv_clear(["a"], partition + "?")
    assert tq.kv_list(partition) == {partition: {"b": {}}}
    tq.kv_clear(["b"], partition)
    assert tq.kv_list(partition) == {partition: {}}


def test_tags_take_numbers_of_numpy_and_torch_and_refuse_what_is_not_plain(queue: Stack, partition: str) -> None:
    tq.kv_put("a", partition, {"x": 1}, {"score": np.float64(0.5), "step": torch.tensor(3)})
    assert tq.kv_list(partition) == {partition: {"a": {"score": 0.5, "step": 3}}}
    used = queue.used()
    with pytest.raises(TypeError, match="put other values as fields"):
        tq.kv_put("b", partition, {"x": torch.ones(1000)}, {"bad": object()})
    assert list(tq.kv_list(partition)[partition]) == ["a"]
    wait_until(lambda: queue.used() == used, "the refused put's block is freed")


def test_the_data_parser_rewrites_what_is_stored(queue: Stack, partition: str) -> None:
    data = batch(x=torch.tensor([1, 2]), s=NonTensorStack("a", "b"))
    tq.kv_batch_put(
        ["a", "b"], partition, data, data_parser=lambda f: {"x": f["x"] * 10, "s": [s + "!" for s in f["s"]]}
    )
    got = tq.kv_batch_get(["a", "b"], partition)
    assert got["x"].tolist() == [10, 20]
    assert list(got["s"]) == ["a!", "b!"]


PARSER_ERRORS: list[tuple[Any, str]] = [
    (3, "data_parser must be callable"),
    (lambda fields: [1], "must return a dict"),
    (lambda fields: {"y": fields["x"]}, "must not change dict keys"),
    (lambda fields: {"x": fields["x"][:1]}, "changed the number of elements"),
    (lambda fields: 1 / 0, "division by zero"),
]


@pytest.mark.parametrize(("parser", "text"), PARSER_ERRORS, ids=[text for _, text in PARSER_ERRORS])
def test_a_wrong_data_parser_is_a_runtime_error_with_its_cause(
    queue: Stack, partition: str, parser: Any, text: str
) -> None:
    with pytest.raises(RuntimeError, match=text):
        tq.kv_batch_put(["a", "b"], partition, batch(x=torch.tensor([1, 2])), data_parser=parser)
    assert tq.kv_list(partition) == {}


def invoke(twin: str, name: str, **arguments: Any) -> Any:
    if twin == "sync":
        return getattr(tq, name)(**arguments)
    return asyncio.run(getattr(tq, f"async_{name}")(**arguments))
