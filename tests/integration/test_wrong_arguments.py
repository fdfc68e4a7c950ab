"""A wrong argument is a TransferQueueError that names it, at once, and costs nobody else their connection."""

from __future__ import annotations

import copy
import enum
import http
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.stack import Stack
from transfer_queue.errors import InvalidInputError, InvalidTypeError

ROWS = TensorDict({"x": torch.ones(1, 2)}, [1])
GOOD: dict[str, dict[str, Any]] = {
    "kv_list": {"partition_id": "p"},
    "kv_retrieve_meta": {"keys": ["a"], "partition_id": "p"},
    "kv_retrieve_keys": {"global_indexes": [0], "partition_id": "p"},
    "get_meta": {
        "data_fields": ["x"],
        "batch_size": 1,
        "partition_id": "p",
        "mode": "fetch",
        "task_name": "t",
        "sampling_config": {},
        "timeout": 0.0,
    },
    "put": {"data": ROWS, "partition_id": "p"},
    "get_data": {},
    "ack": {"metadata": tq.BatchMeta()},
    "set_custom_meta": {},
    "clear_samples": {},
    "clear_partition": {"partition_id": "p"},
    "get_production_status": {"data_fields": ["x"], "partition_id": "p"},
    "get_consumption_status": {"task_name": "t", "partition_id": "p"},
    "reset_consumption": {"partition_id": "p", "task_name": "t"},
}
WRONG = [
    ("kv_list", "partition_id", 5),
    ("kv_list", "partition_id", "\ud800"),
    ("kv_list", "partition_id", ""),
    ("kv_retrieve_meta", "keys", ["a", ""]),
    ("get_meta", "data_fields", ["x", ""]),
    ("get_consumption_status", "task_name", ""),
    ("reset_consumption", "task_name", ""),
    ("ack", "task_name", ""),
    ("kv_retrieve_meta", "partition_id", None),
    ("kv_retrieve_meta", "keys", ["\ud800"]),
    ("kv_retrieve_keys", "global_indexes", [2**70]),
    ("get_meta", "data_fields", "x"),
    ("get_meta", "data_fields", None),
    ("get_meta", "data_fields", [1]),
    ("get_meta", "batch_size", 1.5),
    ("get_meta", "batch_size", -1),
    ("get_meta", "batch_size", True),
    ("get_meta", "timeout", True),
    ("get_meta", "lease", True),
    ("get_meta", "token_budget", True),
    ("reset_consumption", "idle", True),
    ("get_meta", "batch_size", 2**70),
    ("get_meta", "partition_id", 5),
    ("get_meta", "mode", 5),
    ("get_meta", "task_name", 5),
    ("get_meta", "sampling_config", [1]),
    ("get_meta", "sampling_config", {1: 2}),
    ("get_meta", "sampling_config", {"a": object()}),
    ("get_meta", "timeout", "soon"),
    ("get_meta", "timeout", -1.0),
    ("get_meta", "timeout", float("nan")),
    ("put", "partition_id", 5),
    ("put", "metadata", 5),
    ("get_data", "metadata", None),
    ("set_custom_meta", "metadata", None),
    ("clear_samples", "metadata", "rows"),
    ("clear_partition", "partition_id", None),
    ("get_production_status", "data_fields", 5),
    ("get_consumption_status", "task_name", None),
    ("reset_consumption", "task_name", 5),
]


@pytest.mark.parametrize(("call", "argument", "value"), WRONG)
def test_a_wrong_argument_is_refused_by_its_name(queue: Stack, call: str, argument: str, value: object) -> None:
    method: Callable[..., Any] = getattr(tq.get_client(), call)
    with pytest.raises(tq.TransferQueueError, match=argument):
        method(**{**GOOD[call], argument: value})


def test_empty_names_and_lists_are_refused_by_the_key_value_interface(queue: Stack, partition: str) -> None:
    meta = tq.kv_put("a", partition, {"x": torch.ones(2)})
    with pytest.raises(InvalidInputError, match="keys must not be empty"):
        tq.kv_put("", partition, {"x": torch.ones(2)})
    for get, rows in ((tq.kv_batch_get, ("a", partition)), (tq.kv_batch_get_by_meta, (meta,))):
        with pytest.raises(InvalidInputError, match="select_fields is an empty list; leave it out"):
            get(*rows, select_fields=[])
        with pytest.raises(InvalidInputError, match="select_fields holds an empty name"):
            get(*rows, select_fields="")
    with pytest.raises(InvalidInputError, match="fields is an empty list"):
        tq.kv_update("a", partition, [], {}, parser=lambda old, new: new)
    tags = tq.kv_put("b", partition, tag={"n": 1})
    assert tq.kv_batch_get_by_meta(tags).batch_size == torch.Size([0])
    assert list(tq.kv_list(partition)[partition]) == ["a", "b"]


def test_the_production_of_no_fields_is_never_complete_and_says_so(
    queue: Stack, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    tq.kv_put("a", partition, {"x": torch.ones(2)})
    assert not tq.get_client().check_production_status([], partition)
    assert "data_fields names no field" in caplog.text


@pytest.mark.parametrize("tag", [{"a": object()}, {"a": 2**70}, {"a": "\ud800"}, {1: 2}])
def test_a_tag_that_cannot_be_sent_is_refused_and_leaves_no_trace(queue: Stack, partition: str, tag: Any) -> None:
    with pytest.raises(tq.TransferQueueError, match="tags"):
        tq.kv_put("a", partition, {"x": torch.ones(2)}, tag)
    assert tq.kv_list(partition) == {}


def test_a_wish_for_too_many_rows_is_refused_before_they_take_memory(queue: Stack, partition: str) -> None:
    with pytest.raises(tq.TransferQueueError, match=re.escape(str(2**27))):
        tq.get_client().get_meta([], 2**27, partition, mode="insert")
    assert partition not in tq.get_client().get_partition_list()


def test_a_put_whose_keys_do_not_fit_a_message_is_refused_at_once(queue: Stack, partition: str) -> None:
    keys = [f"{number}-{'x' * 100_000}" for number in range(200)]
    with pytest.raises(tq.TransferQueueError, match="shorter keys"):
        tq.kv_batch_put(keys, partition, tags=[{} for _ in keys])
    assert tq.kv_list(partition) == {}


def test_a_long_answer_arrives_whole(queue: Stack, partition: str) -> None:
    for part in range(4):
        keys = [f"{part}-{number}-{'x' * 50_000}" for number in range(100)]
        tq.kv_batch_put(keys, partition, tags=[{} for _ in keys])
    listed = tq.kv_list(partition)[partition]
    assert sum(map(len, listed)) > 16 << 20
    assert len(listed) == 400


class Kind(str, enum.Enum):
    """A string of a kind of its own, as programs have them for names."""

    PROMPT = "prompt"


def test_kinds_of_strings_and_numbers_are_what_they_are_kinds_of(queue: Stack, partition: str) -> None:
    class Name(str):
        __slots__ = ()

    tq.kv_batch_put([Name("a"), Kind.PROMPT], Name(partition), TensorDict({Name("x"): torch.arange(2)}, [2]))
    tags = {"kind": Kind.PROMPT, "name": Name("n"), "step": http.HTTPStatus.OK, "score": np.float32(0.5)}
    tq.kv_put(np.str_("c"), partition, tag=tags)
    assert tq.kv_batch_get(["prompt", "a"], partition, "x")["x"].tolist() == [1, 0]
    assert tq.kv_list(partition)[partition]["c"] == {"kind": "prompt", "name": "n", "step": 200, "score": 0.5}


def test_metadata_that_was_changed_into_nonsense_is_refused_by_its_name(queue: Stack, partition: str) -> None:
    client = tq.get_client()
    meta = client.put(TensorDict({"x": torch.arange(2)}, [2]), partition_id=partition)
    for indexes in ([0.5, 1.5], [0, "1"], [None, 1]):
        with pytest.raises(InvalidTypeError, match="global_indexes must hold ints"):
            client.get_data(tq.BatchMeta(indexes, [partition] * 2, {"x": {}}))
    short = meta.copy()
    short.partition_ids.pop()
    for call in (client.get_data, client.clear_samples, client.set_custom_meta):
        with pytest.raises(InvalidInputError, match=r"metadata: partition_ids has 1 entries for 2 global_indexes"):
            call(short)
    meta.update_custom_meta([{"a": object()}, {}])
    with pytest.raises(InvalidTypeError, match=r"custom_meta: .*not object"):
        client.set_custom_meta(meta)
    assert client.get_data(meta)["x"].tolist() == [0, 1]


def test_a_client_cannot_be_sent_to_another_process(queue: Stack) -> None:
    for send in (pickle.dumps, copy.deepcopy):
        with pytest.raises(InvalidTypeError, match=r"cannot be pickled or copied.*init\(\)"):
            send(tq.get_client())


@pytest.mark.parametrize("call", [tq.save_checkpoint, tq.load_checkpoint])
def test_a_checkpoint_directory_is_a_path(queue: Stack, call: Callable[[Any], None]) -> None:
    with pytest.raises(InvalidTypeError, match="checkpoint_dir must be a path or a URL, not int"):
        call(5)


def test_zero_copy_is_true_or_false(queue: Stack, partition: str) -> None:
    tq.kv_put("a", partition, {"x": torch.ones(2)})
    with pytest.raises(InvalidTypeError, match="zero_copy"):
        tq.kv_batch_get("a", partition, zero_copy="no")  # type: ignore[arg-type]


def test_names_may_have_slashes_spaces_and_any_letters(queue: Stack, partition: str) -> None:
    part, key, field = f"{partition}/a b/ß", "step 1/ключ 🔑\n", "reward/acc ü"
    tq.kv_put(key, part, {field: torch.tensor(3)}, {"ö/1": "é"})
    assert tq.kv_list(part) == {part: {key: {"ö/1": "é"}}}
    assert tq.kv_batch_get(key, part)[field].tolist() == [3]
    meta = tq.get_client().get_meta([field], 1, part, task_name="t/1 ñ")
    assert tq.get_client().get_data(meta)[field].tolist() == [3]
    tq.kv_clear(key, part)


def test_calls_that_would_do_nothing_or_something_else_are_refused_or_said(
    queue: Stack, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = tq.get_client()
    metadata = client.put(ROWS, partition_id=partition)
    tq.kv_put("a", partition, {"x": torch.ones(2)})
    near = f"{partition[:-1]}-{partition[-1]}"
    many = client.put(TensorDict({"x": torch.zeros(8200, 1)}, [8200]), partition_id=f"{partition}-many")

    def out(**more: torch.Tensor) -> object:
        return tq.kv_batch_get("a", partition, ["x"], out={"x": torch.zeros(1, 2), **more})

    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: tq.kv_batch_get("a", near), f"no partition '{near}'; did you mean '{partition}'"),
        (
            lambda: client.get_meta(["x"], 1, near, task_name="t", timeout=0.01),
            f"does not exist.*did you mean '{partition}'",
        ),
        (lambda: out(y=torch.zeros(1)), r"out has entries \['y'\], which are not among the fields that are read"),
        (lambda: tq.kv_batch_get_by_meta(metadata), "read a BatchMeta with get_data"),  # type: ignore[arg-type]
        (lambda: client.get_data(tq.kv_put("a", partition, tag={})), "kv_batch_get_by_meta"),  # type: ignore[arg-type]
        (lambda: client.ack(many, "tarin"), f"task 'tarin' has taken no rows of partition '{partition}-many'"),
    ]
    for call, words in refused:
        with pytest.raises(tq.TransferQueueError, match=words):
            call()
    assert client.get_consumption_status("tarin", f"{partition}-many")[1].sum() == 0
    caplog.clear()
    last = f"{partition}-last"
    client.put(ROWS, partition_id=last, is_last=True)
    assert not caplog.records
    said: list[tuple[Callable[[], object], str]] = [
        (lambda: client.put(ROWS, partition_id=last), f"partition '{last}' got rows after a put with is_last=True"),
        (lambda: metadata.select_fields(["x", "xx"]), "no fields ['xx']; did you mean 'x'?"),
        (
            lambda: client.get_meta(["x"], 1, partition, task_name="u", sampling_config={"dp_rnak": 0}),
            "sampling_config: no sampler reads all of ['dp_rnak']; did you mean 'dp_rank'?",
        ),
        (
            lambda: client.get_meta(["x"], 1, partition, task_name="v", sampling_config={"dp_rank": 0}),
            "SequentialSampler of this queue does not read dp_rank; GRPOGroupNSampler, PrioritySampler, Rank",
        ),
        (
            lambda: client.get_meta(["x"], 1, partition, task_name="w", sampling_config={"n_samples_per_prompt": 2}),
            "does not read n_samples_per_prompt: set it in controller.sampler.args of the queue",
        ),
    ]
    for call, words in said:
        caplog.clear()
        call()
        assert words in caplog.text
