"""Every public call with every kind of bad input, blocking and awaited: a documented error that names the cause."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.stack import Stack, running_stack
from tests.waiting import wait_until
from transfer_queue.dataloader import clear_end, mark_end
from transfer_queue.errors import (
    ConnectionLostError,
    InvalidInputError,
    InvalidTypeError,
    NotInitializedError,
    NotReadyError,
    WaitTimeoutError,
)

ROWS = TensorDict({"x": torch.ones(1, 2)}, [1])
META = tq.BatchMeta([0], ["p"], {"x": {}})
Arguments = dict[str, Any]

KV: dict[str, Arguments] = {
    "kv_put": {
        "key": "a",
        "partition_id": "p",
        "fields": {"x": 1},
        "tag": {"t": 1},
        "data_parser": None,
        "lock": None,
        "placement": None,
    },
    "kv_batch_put": {
        "keys": ["a"],
        "partition_id": "p",
        "fields": ROWS,
        "tags": [{}],
        "data_parser": None,
        "lock": None,
        "placement": None,
    },
    "kv_batch_get": {
        "keys": ["a"],
        "partition_id": "p",
        "select_fields": None,
        "zero_copy": False,
        "out": None,
        "device": None,
        "layout": None,
    },
    "kv_batch_get_by_meta": {
        "meta": tq.KVBatchMeta(["a"], [{}], "p", ["x"]),
        "select_fields": None,
        "zero_copy": False,
        "out": None,
        "device": None,
        "layout": None,
    },
    "kv_list": {"partition_id": "p"},
    "kv_clear": {"keys": ["a"], "partition_id": "p"},
}
CLIENT: dict[str, Arguments] = {
    "get_meta": {
        "data_fields": ["x"],
        "batch_size": 1,
        "partition_id": "p",
        "mode": "fetch",
        "task_name": "t",
        "sampling_config": {},
        "timeout": 0.05,
        "lease": None,
        "token_budget": None,
        "is_last": False,
    },
    "put": {
        "data": ROWS,
        "metadata": None,
        "partition_id": "p",
        "data_parser": None,
        "custom_meta": None,
        "is_last": False,
        "placement": None,
    },
    "get_data": {"metadata": META, "zero_copy": False, "out": None, "device": None, "layout": None},
    "ack": {"metadata": META, "task_name": "t"},
    "set_custom_meta": {"metadata": META},
    "clear_samples": {"metadata": META},
    "clear_partition": {"partition_id": "p"},
    "get_production_status": {"data_fields": ["x"], "partition_id": "p"},
    "get_consumption_status": {"task_name": "t", "partition_id": "p"},
    "check_production_status": {"data_fields": ["x"], "partition_id": "p"},
    "check_consumption_status": {"task_name": "t", "partition_id": "p"},
    "check_production_completed": {"partition_id": "p"},
    "check_stream_drained": {"task_name": "t", "partition_id": "p"},
    "reset_consumption": {"partition_id": "p", "task_name": None, "idle": 0.0},
    "get_partition_list": {},
    "kv_retrieve_meta": {"keys": ["a"], "partition_id": "p", "create": False},
    "kv_retrieve_keys": {"global_indexes": [0], "partition_id": "p"},
    "kv_list": {"partition_id": "p"},
}
CALLS = [("tq", name) for name in KV] + [("client", name) for name in CLIENT]

WRONG_TYPES: dict[str, list[Any]] = {
    "key": [5, None, b"a"],
    "keys": [5, ("a",), [1], [None], {"a": 1}],
    "partition_id": [5, b"p"],
    "fields": [5, [1], "x"],
    "tag": [5, [1], {1: 2}, {"a": object()}],
    "tags": [5, {"a": 1}, [5], [{1: 2}]],
    "select_fields": [5, [5], {"x": 1}],
    "meta": [5, None, "a"],
    "data_fields": [5, "x", None, [5]],
    "batch_size": [1.5, "1", None],
    "mode": [5, None],
    "task_name": [5],
    "sampling_config": [5, [1], {1: 2}],
    "timeout": ["soon"],
    "idle": ["soon"],
    "lease": ["long", [1]],
    "token_budget": ["many", 1.5],
    "is_last": ["yes", 1],
    "custom_meta": [5, {"a": 1}, [5], [{1: 2}]],
    "zero_copy": ["yes", 1],
    "out": [5, ["x"], "x"],
    "device": [[1], 1.5],
    "layout": [5, ["dense"]],
    "data": [5, None, "x", [1]],
    "metadata": [5, "rows"],
    "data_parser": [5, "parser"],
    "lock": [5, "k"],
    "placement": [5],
    "create": ["yes", 2],
    "global_indexes": [1.5, "0", ["0"], [1.5], (0,)],
}
NOT_TYPE_ERRORS = {
    ("kv_put", "fields"): ValueError,
    ("kv_put", "data_parser"): RuntimeError,
    ("kv_batch_put", "data_parser"): RuntimeError,
    ("put", "data_parser"): RuntimeError,
}
"""Errors that 0.1.x raises in another class, which callers catch."""


def arguments_of(owner: str, call: str) -> Arguments:
    return (KV if owner == "tq" else CLIENT)[call]


def wrong_types() -> list[tuple[str, str, str, Any]]:
    return [
        (owner, call, argument, value)
        for owner, call in CALLS
        for argument in arguments_of(owner, call)
        for value in WRONG_TYPES[argument]
        if not (call == "kv_batch_get_by_meta" and value == {"x": 1})
    ]


def invoke(owner: Any, call: str, twin: str, arguments: Arguments) -> Any:
    if twin == "sync":
        return getattr(owner, call)(**arguments)
    return asyncio.run(getattr(owner, f"async_{call}")(**arguments))


def owner_of(name: str) -> Any:
    return tq if name == "tq" else tq.get_client()


@pytest.mark.parametrize("twin", ["sync", "async"])
@pytest.mark.parametrize(
    ("owner", "call", "argument", "value"), wrong_types(), ids=lambda value: str(value).partition(" at 0x")[0][:24]
)
def test_a_wrong_type_is_refused_by_its_name(
    queue: Stack, owner: str, call: str, argument: str, value: Any, twin: str
) -> None:
    expected = NOT_TYPE_ERRORS.get((call, argument), TypeError)
    if argument in ("tag", "sampling_config") and isinstance(value, dict):
        expected = (TypeError, ValueError)  # a dict, with something in it that cannot be
    with pytest.raises(expected, match=argument) as caught:
        invoke(owner_of(owner), call, twin, {**arguments_of(owner, call), argument: value})
    assert isinstance(caught.value, tq.TransferQueueError)


EMPTY: list[tuple[str, str, str, Any, str]] = [
    ("tq", "kv_put", "partition_id", "", "partition_id must not be empty"),
    ("tq", "kv_batch_put", "keys", [], "keys is an empty list"),
    ("tq", "kv_batch_put", "tags", [], "tags.*does not match"),
    ("tq", "kv_batch_put", "partition_id", "", "partition_id must not be empty"),
    ("tq", "kv_batch_get", "keys", [], "keys is an empty list"),
    ("tq", "kv_batch_get", "partition_id", "", "partition_id must not be empty"),
    ("tq", "kv_batch_get_by_meta", "meta", tq.KVBatchMeta(), "partition_id"),
    ("tq", "kv_batch_get_by_meta", "meta", tq.KVBatchMeta(partition_id="p"), "keys is an empty list"),
    ("tq", "kv_clear", "keys", [], "keys is an empty list"),
    ("tq", "kv_clear", "partition_id", "", "partition_id must not be empty"),
    ("client", "get_meta", "partition_id", "", "partition_id must not be empty"),
    ("client", "put", "metadata", tq.BatchMeta(), "metadata is empty"),
    ("client", "put", "data", TensorDict({"x": torch.ones(0, 2)}, [0]), "data is empty"),
    ("client", "put", "partition_id", None, "partition_id must be provided"),
    ("client", "put", "custom_meta", [], "0 custom_meta.*does not match 1 rows"),
    ("client", "put", "partition_id", "", "partition_id must not be empty"),
    ("client", "clear_partition", "partition_id", "", "partition_id must not be empty"),
    ("client", "get_production_status", "partition_id", "", "partition_id must not be empty"),
    ("client", "get_consumption_status", "partition_id", "", "partition_id must not be empty"),
    ("client", "check_production_status", "partition_id", "", "partition_id must not be empty"),
    ("client", "check_consumption_status", "partition_id", "", "partition_id must not be empty"),
    ("client", "check_production_completed", "partition_id", "", "partition_id must not be empty"),
    ("client", "check_stream_drained", "partition_id", "", "partition_id must not be empty"),
    ("client", "reset_consumption", "partition_id", "", "partition_id must not be empty"),
    ("client", "kv_retrieve_meta", "partition_id", "", "partition_id must not be empty"),
    ("client", "kv_retrieve_keys", "partition_id", "", "partition_id must not be empty"),
    ("client", "kv_retrieve_meta", "keys", [], "keys is an empty list"),
    ("client", "kv_retrieve_keys", "global_indexes", [], "global_indexes is an empty list"),
]


@pytest.mark.parametrize("twin", ["sync", "async"])
@pytest.mark.parametrize(("owner", "call", "argument", "value", "text"), EMPTY, ids=[f"{c[1]}-{c[4]}" for c in EMPTY])
def test_something_empty_is_refused_by_its_name(
    queue: Stack, owner: str, call: str, argument: str, value: Any, text: str, twin: str
) -> None:
    with pytest.raises(InvalidInputError, match=text):
        invoke(owner_of(owner), call, twin, {**arguments_of(owner, call), argument: value})


UNKNOWN: dict[str, Any] = {
    "kv_batch_get": ValueError,
    "kv_batch_get_by_meta": ValueError,
    "kv_list": {},
    "kv_clear": None,
    "get_meta": WaitTimeoutError,
    "get_data": (RuntimeError, KeyError),
    "set_custom_meta": KeyError,
    "ack": None,
    "clear_samples": None,
    "clear_partition": None,
    "get_production_status": (None, None),
    "get_consumption_status": (None, None),
    "check_production_status": False,
    "check_consumption_status": False,
    "check_production_completed": False,
    "check_stream_drained": False,
    "reset_consumption": False,
    "kv_retrieve_meta": ValueError,
    "kv_retrieve_keys": RuntimeError,
}
"""What a call on a partition that does not exist raises or returns."""


def is_error(expected: Any) -> bool:
    kinds = expected if isinstance(expected, tuple) else (expected,)
    return all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds)


@pytest.mark.parametrize("twin", ["sync", "async"])
@pytest.mark.parametrize("call", UNKNOWN)
def test_an_unknown_partition_is_an_error_that_names_it_or_nothing(
    queue: Stack, partition: str, call: str, twin: str
) -> None:
    owner, table = (tq, KV) if call in KV else (tq.get_client(), CLIENT)
    arguments = dict(table[call])
    if "partition_id" in arguments:
        arguments["partition_id"] = partition
    if "metadata" in arguments:
        arguments["metadata"] = tq.BatchMeta([0], [partition], {"x": {}})
    if "meta" in arguments:
        arguments["meta"] = tq.KVBatchMeta(["a"], [{}], partition, ["x"])
    expected = UNKNOWN[call]
    if is_error(expected):
        with pytest.raises(expected, match=partition) as caught:
            invoke(owner, call, twin, arguments)
        assert isinstance(caught.value, tq.TransferQueueError)
    else:
        result = invoke(owner, call, twin, arguments)
        assert result == expected
    assert partition not in tq.get_client().get_partition_list()


@pytest.mark.parametrize("twin", ["sync", "async"])
def test_an_unknown_field_is_named_where_data_is_asked_for(queue: Stack, partition: str, twin: str) -> None:
    client = tq.get_client()
    tq.kv_put("a", partition, {"x": torch.ones(2)})

    def call(owner: Any, name: str, **arguments: Any) -> Any:
        return invoke(owner, name, twin, arguments)

    with pytest.raises(NotReadyError, match=r"'z'.*has \['x'\]"):
        call(tq, "kv_batch_get", keys="a", partition_id=partition, select_fields="z")
    meta = tq.KVBatchMeta(["a"], [{}], partition, ["x"])
    with pytest.raises(InvalidInputError, match=r"select_fields.*'z'"):
        call(tq, "kv_batch_get_by_meta", meta=meta, select_fields=["z"])
    with pytest.raises(WaitTimeoutError, match="z"):
        call(client, "get_meta", data_fields=["z"], batch_size=1, partition_id=partition, task_name="t", timeout=0.05)
    found = call(
        client, "get_meta", data_fields=["z"], batch_size=1, partition_id=partition, mode="force_fetch", timeout=0.0
    )
    assert (found.field_names, found.production_status.tolist()) == ([], [0])
    with pytest.raises((ValueError, KeyError, RuntimeError), match="z") as caught:
        call(client, "get_data", metadata=tq.BatchMeta(found.global_indexes, [partition], {"z": {}}))
    assert isinstance(caught.value, tq.TransferQueueError)
    with pytest.raises(NotReadyError, match="'z'"):
        call(tq, "kv_batch_get_by_meta", meta=tq.KVBatchMeta(["a"], [{}], partition, ["x", "z"]))
    assert call(client, "get_production_status", data_fields=["z"], partition_id=partition) == (None, None)
    assert call(client, "check_production_status", data_fields=["z"], partition_id=partition) is False
    assert call(client, "get_meta", data_fields=["z"], batch_size=1, partition_id=partition, mode="insert").size == 1


NOTHING: list[tuple[str, str, Arguments, Any]] = [
    ("client", "get_data", {"metadata": tq.BatchMeta()}, torch.Size([0])),
    ("client", "ack", {"metadata": tq.BatchMeta()}, None),
    ("client", "set_custom_meta", {"metadata": tq.BatchMeta()}, None),
    ("client", "clear_samples", {"metadata": tq.BatchMeta()}, None),
    ("client", "get_production_status", {"data_fields": []}, (None, None)),
    ("client", "check_production_status", {"data_fields": []}, False),
]

UNNAMED: list[tuple[str, str, Arguments]] = [
    ("tq", "kv_batch_get", {"select_fields": []}),
    ("tq", "kv_batch_get_by_meta", {"select_fields": []}),
    ("client", "get_consumption_status", {"task_name": ""}),
    ("client", "check_consumption_status", {"task_name": ""}),
    ("client", "check_stream_drained", {"task_name": ""}),
]


@pytest.mark.parametrize("twin", ["sync", "async"])
@pytest.mark.parametrize(("owner", "call", "empty"), UNNAMED, ids=[case[1] for case in UNNAMED])
def test_to_name_nothing_is_refused(
    queue: Stack, partition: str, owner: str, call: str, empty: Arguments, twin: str
) -> None:
    tq.kv_put("a", partition, {"x": torch.ones(2)})
    arguments = {**arguments_of(owner, call), "partition_id": partition, **empty}
    if "meta" in arguments:
        arguments["meta"] = tq.KVBatchMeta(["a"], [{}], partition, ["x"])
    arguments = {name: value for name, value in arguments.items() if name in arguments_of(owner, call)}
    with pytest.raises(ValueError, match=next(iter(empty))):
        invoke(owner_of(owner), call, twin, arguments)


@pytest.mark.parametrize("twin", ["sync", "async"])
@pytest.mark.parametrize(("owner", "call", "empty", "expected"), NOTHING, ids=[case[1] for case in NOTHING])
def test_to_ask_for_nothing_is_answered_with_nothing(
    queue: Stack, partition: str, owner: str, call: str, empty: Arguments, expected: Any, twin: str
) -> None:
    tq.kv_put("a", partition, {"x": torch.ones(2)})
    arguments = {**arguments_of(owner, call), "partition_id": partition, **empty}
    arguments = {name: value for name, value in arguments.items() if name in arguments_of(owner, call)}
    found = invoke(owner_of(owner), call, twin, arguments)
    assert (found.batch_size if isinstance(found, TensorDict) else found) == expected


@pytest.mark.parametrize("twin", ["sync", "async"])
def test_a_wait_that_ends_without_rows_says_what_was_missing(queue: Stack, partition: str, twin: str) -> None:
    tq.kv_put("a", partition, {"x": torch.ones(2)})
    arguments = {**CLIENT["get_meta"], "partition_id": partition, "batch_size": 3, "timeout": 0.05}
    with pytest.raises(RuntimeError, match="Timeout") as caught:
        invoke(tq.get_client(), "get_meta", twin, arguments)
    assert isinstance(caught.value, WaitTimeoutError)
    assert all(text in str(caught.value) for text in (partition, "x", "3"))


@pytest.mark.parametrize("twin", ["sync", "async"])
def test_a_closed_client_says_so_in_every_call(queue: Stack, monkeypatch: pytest.MonkeyPatch, twin: str) -> None:
    client = tq.TransferQueueClient("short", queue.address)
    client.close()
    client.close()
    for call, arguments in CLIENT.items():
        with pytest.raises(NotInitializedError, match=r"client short is closed.*init\(\)"):
            invoke(client, call, twin, arguments)
    with pytest.raises(NotInitializedError, match="closed"):
        client.initialize_storage_manager("SimpleStorage", {"zmq_info": {}})
    with pytest.raises(NotInitializedError, match="closed"):
        assert client.metrics_endpoint
    tq.close()
    monkeypatch.delenv("TQ_CONTROLLER_ADDRESS")
    for call, arguments in KV.items():
        with pytest.raises(AssertionError, match="has not been initialized"):
            invoke(tq, call, twin, arguments)
    with pytest.raises(AssertionError, match=r"tq\.init\(\)"):
        tq.get_client()


@pytest.fixture
def short_stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A queue of one test's own, with this process attached and requests that give up soon."""
    tq.close()
    monkeypatch.setenv("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", "1")
    monkeypatch.setenv("TQ_PUT_WAIT", "0")
    with running_stack(units=1, capacity="16Mi") as stack:
        monkeypatch.setenv("TQ_CONTROLLER_ADDRESS", stack.address)
        tq.init()
        tq.kv_put("a", "p", {"x": torch.ones(2)})
        yield stack
        tq.close()


def failures_of_all_calls() -> dict[str, BaseException | None]:
    """What each call raised, blocking and awaited, all at once."""

    def attempt(owner: str, call: str, twin: str) -> BaseException | None:
        try:
            invoke(owner_of(owner), call, twin, arguments_of(owner, call))
        except tq.TransferQueueError as error:
            return error
        return None

    cases = [(owner, call, twin) for owner, call in CALLS for twin in ("sync", "async")]
    with ThreadPoolExecutor(len(cases)) as pool:
        return dict(zip(map(".".join, cases), pool.map(lambda case: attempt(*case), cases), strict=True))


def ends_with(name: str) -> type[Exception]:
    """The error of a call whose controller is gone; a call with a timeout says that its time is over."""
    return WaitTimeoutError if "get_meta" in name else ConnectionLostError


def test_with_the_controller_gone_every_call_names_its_address_and_what_to_do(short_stack: Stack) -> None:
    short_stack.controller.kill()
    failures = failures_of_all_calls()
    wrong = {
        name: error
        for name, error in failures.items()
        if not (isinstance(error, ends_with(name)) and short_stack.address in str(error))
    }
    assert wrong == {}
    assert all(isinstance(error, RuntimeError) for error in failures.values())
    short_stack.controller.spawn()
    short_stack.controller.wait_ready()


def test_with_a_silent_controller_every_call_gives_up_and_later_works_again(short_stack: Stack) -> None:
    process = short_stack.controller.process
    process.send_signal(signal.SIGSTOP)
    failures = failures_of_all_calls()
    process.send_signal(signal.SIGCONT)
    wrong = {
        name: error
        for name, error in failures.items()
        if not (isinstance(error, (WaitTimeoutError, ConnectionLostError)) and short_stack.address in str(error))
    }
    assert wrong == {}

    def works() -> bool:  # what the calls had asked for may still be carried out, the clearing of rows too
        try:
            tq.kv_put("b", "other", {"x": torch.ones(2)})
            return tq.kv_batch_get("b", "other")["x"].values().tolist() == [1.0, 1.0]
        except (WaitTimeoutError, ConnectionLostError):
            return False

    wait_until(works, "the client works again", 60)


INIT = [("conf", 5), ("conf", "host:1"), ("conf", ["x"])]


@pytest.mark.parametrize(("argument", "value"), INIT)
def test_init_refuses_a_wrong_conf_by_its_name(argument: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_CONTROLLER_ADDRESS", raising=False)
    with pytest.raises(InvalidTypeError, match=argument):
        tq.init(value)


def test_init_says_where_a_setting_goes() -> None:
    with pytest.raises(TypeError, match=r"write init\(\{'layout': 'dense'\}\)"):
        tq.init(layout="dense")  # type: ignore[arg-type]


def test_both_puts_take_a_dict_of_columns_and_no_empty_key(queue: Stack, partition: str) -> None:
    columns = {"x": torch.arange(2.0), "text": ["a", "b"]}
    tq.kv_batch_put(["a", "b"], partition, columns)
    assert tq.kv_batch_get("b", partition)["text"] == ["b"]
    assert tq.get_client().put(columns, partition_id=partition).size == 2
    with pytest.raises(InvalidInputError, match="x"):
        tq.kv_batch_put(["a"], partition, columns)
    with pytest.raises(InvalidInputError, match="keys must not be empty"):
        tq.kv_put("", partition, {"x": 1})


CONSTRUCTOR: list[tuple[str, Any, type[Exception]]] = [
    ("client_id", 5, TypeError),
    ("controller_info", None, ValueError),
    ("controller_info", 5, TypeError),
    ("controller_info", "nowhere", ValueError),
    ("zmq_io_threads", 0, ValueError),
    ("zmq_io_threads", "many", TypeError),
    ("zmq_max_sockets", -1, ValueError),
]


@pytest.mark.parametrize("kind", [tq.TransferQueueClient, tq.AsyncTransferQueueClient])
@pytest.mark.parametrize(("argument", "value", "error"), CONSTRUCTOR)
def test_a_client_refuses_a_wrong_argument_by_its_name(
    kind: Any, argument: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=argument) as caught:
        kind(**{"client_id": "c", "controller_info": "127.0.0.1:1", argument: value})
    assert isinstance(caught.value, tq.TransferQueueError)


BATCH = tq.BatchMeta([3, 4], ["p", "p"], {"x": {"dtype": None, "shape": (1,)}})
KEYED = tq.KVBatchMeta(["a", "b"], [{}, {}], "p", ["x"])
METADATA: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("batch lengths", lambda: tq.BatchMeta([1], []), ValueError, "partition_ids"),
    ("batch tags", lambda: tq.BatchMeta([1], ["p"], custom_meta=[{}, {}]), ValueError, "custom_meta"),
    ("batch status", lambda: tq.BatchMeta([1], ["p"], production_status=[1, 1]), ValueError, "production_status"),
    ("batch samples", lambda: tq.BatchMeta(samples=[5]), ValueError, "samples"),  # type: ignore[list-item]
    ("batch index", lambda: BATCH[[0]], TypeError, "integers or slices"),  # type: ignore[index]
    ("batch chunk 0", lambda: BATCH.chunk(0), ValueError, "chunks"),
    ("batch chunk type", lambda: BATCH.chunk("2"), TypeError, "chunks"),  # type: ignore[arg-type]
    ("batch select", lambda: BATCH.select_samples([2]), ValueError, "sample_indices"),
    ("batch select type", lambda: BATCH.select_samples(["a"]), TypeError, "sample_indices"),  # type: ignore[list-item]
    ("batch reorder", lambda: BATCH.reorder([0, 0]), ValueError, "indices"),
    ("batch reorder type", lambda: BATCH.reorder(None), TypeError, "indices"),  # type: ignore[arg-type]
    ("batch update", lambda: BATCH.update_custom_meta([{}]), ValueError, "custom_meta"),
    ("batch fields", lambda: BATCH.add_fields(ROWS), ValueError, "batch size"),
    ("batch union", lambda: BATCH.union(tq.BatchMeta([9, 8], ["p", "p"])), ValueError, "global_indexes do not match"),
    ("batch concat", lambda: tq.BatchMeta.concat([BATCH, tq.BatchMeta([9], ["p"])]), ValueError, "Field names"),
    ("keyed lengths", lambda: tq.KVBatchMeta(["a"], []), ValueError, "keys and tags"),
    ("keyed repeats", lambda: tq.KVBatchMeta(["a", "a"], [{}, {}]), ValueError, "duplicated keys"),
    ("keyed select", lambda: KEYED.select_keys(["z"]), RuntimeError, "keys.*not found"),
    ("keyed select twice", lambda: KEYED.select_keys(["a", "a"]), ValueError, "duplicate keys"),
    ("keyed reorder", lambda: KEYED.reorder([0]), ValueError, "indexes"),
    ("keyed chunk", lambda: KEYED.chunk(-1), ValueError, "chunks"),
    ("keyed concat", lambda: tq.KVBatchMeta.concat([KEYED, KEYED]), ValueError, "duplicated keys"),
]


@pytest.mark.parametrize(("call", "error", "text"), [case[1:] for case in METADATA], ids=[c[0] for c in METADATA])
def test_metadata_refuses_what_does_not_fit_by_its_name(
    call: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        call()
    assert isinstance(caught.value, tq.TransferQueueError)
    assert (BATCH.global_indexes, KEYED.keys) == ([3, 4], ["a", "b"])


DATASET: Arguments = {
    "config": None,
    "batch_size": 4,
    "micro_batch_size": 2,
    "data_fields": ["x"],
    "partition_id": "p",
    "task_name": "t",
    "dp_rank": 0,
}


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("batch_size", 0, ValueError),
        ("batch_size", "4", TypeError),
        ("micro_batch_size", 0, ValueError),
        ("micro_batch_size", 5, ValueError),
        ("data_fields", [], ValueError),
        ("data_fields", "x", ValueError),
        ("dp_rank", -1, ValueError),
        ("dp_rank", None, TypeError),
        ("data_fields", [5], TypeError),
        ("partition_id", 5, TypeError),
        ("partition_id", "", ValueError),
        ("task_name", None, TypeError),
        ("task_name", "", ValueError),
        ("should_check_consumption_status", "no", TypeError),
        ("fetch_batch_fn", 5, TypeError),
        ("process_batch_fn", "chunk", TypeError),
    ],
)
def test_a_streaming_dataset_refuses_a_wrong_argument_by_its_name(
    argument: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=argument) as caught:
        tq.StreamingDataset(**{**DATASET, argument: value})
    assert isinstance(caught.value, tq.TransferQueueError)


def test_a_wrong_answer_of_fetch_batch_fn_is_refused_by_its_name(queue: Stack) -> None:
    def fetch(**arguments: Any) -> Any:
        return arguments["batch_index"]

    with pytest.raises(InvalidTypeError, match=r"fetch_batch_fn must return.*not 0"):
        next(iter(tq.StreamingDataset(**{**DATASET, "fetch_batch_fn": fetch})))


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: tq.GRPOGroupNSampler(0), "n_samples_per_prompt"),
        (lambda: tq.SeqlenBalancedSampler(1, 0), "dp_size"),
    ],
)
def test_a_sampler_refuses_a_wrong_argument_by_its_name(make: Callable[[], Any], argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument} must be positive") as caught:
        make()
    assert isinstance(caught.value, tq.TransferQueueError)


@pytest.mark.parametrize("call", ["save_controller", "load_controller", "save_storage", "load_storage"])
async def test_half_a_checkpoint_is_refused_by_the_call_that_takes_the_whole(queue: Stack, call: str) -> None:
    client = tq.get_client()
    whole = rf"{call}_checkpoint is not available.*transfer_queue\.{call.partition('_')[0]}_checkpoint"
    for error in (RuntimeError, NotImplementedError, tq.TransferQueueError):
        with pytest.raises(error, match=whole):
            getattr(client, f"{call}_checkpoint")("/nowhere")
        with pytest.raises(error, match=whole):
            await getattr(client, f"async_{call}_checkpoint")("/nowhere")


def test_the_table_has_every_call_with_every_argument() -> None:
    """Those of the contract, and what is beyond it."""
    for name, arguments in KV.items():
        for call in (name, f"async_{name}"):
            assert list(inspect.signature(getattr(tq, call)).parameters) == list(arguments), call
    client = {name for name in dir(tq.TransferQueueClient) if name.startswith("async_")}
    internal = {"async_run", "async_reset_zero_copy_all_keys_free"}
    halves = {name for name in client if name.endswith("_checkpoint")}
    assert {f"async_{name}" for name in CLIENT} == client - internal - halves
    for name, arguments in CLIENT.items():
        for call in (name, f"async_{name}"):
            found = list(inspect.signature(getattr(tq.TransferQueueClient, call)).parameters)
            assert [each for each in found[1:] if each != "socket"] == list(arguments), call  # ignored, as in 0.1.x


LIFECYCLE: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("save type", lambda: tq.save_checkpoint(5), TypeError, "checkpoint_dir"),  # type: ignore[arg-type]
    ("save empty", lambda: tq.save_checkpoint(""), ValueError, "checkpoint_dir"),
    ("save metadata", lambda: tq.save_checkpoint("/nowhere", metadata=[1]), TypeError, "metadata"),  # type: ignore[arg-type]
    ("save storage", lambda: tq.save_checkpoint("/nowhere", include_storage="no"), TypeError, "include_storage"),  # type: ignore[arg-type]
    ("load type", lambda: tq.load_checkpoint(None), TypeError, "checkpoint_dir"),  # type: ignore[arg-type]
    ("load nothing", lambda: tq.load_checkpoint("/no/such/folder"), FileNotFoundError, "not found"),
    ("mark type", lambda: mark_end(5), TypeError, "partition_id"),  # type: ignore[arg-type]
    ("mark empty", lambda: mark_end(""), ValueError, "partition_id"),
    ("mark producer", lambda: mark_end("p", 5), TypeError, "producer"),  # type: ignore[arg-type]
    ("mark producers", lambda: mark_end("p", "a", 0), ValueError, "producers"),
    ("mark producers type", lambda: mark_end("p", "a", "two"), TypeError, "producers"),  # type: ignore[arg-type]
    ("clear type", lambda: clear_end(5), TypeError, "partition_id"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "error", "text"), [case[1:] for case in LIFECYCLE], ids=[c[0] for c in LIFECYCLE])
def test_a_call_about_the_queue_or_a_stream_refuses_a_wrong_argument_by_its_name(
    queue: Stack, call: Callable[[], Any], error: type[Exception], text: str
) -> None:
    before = tq.get_client().get_partition_list()
    with pytest.raises(error, match=text) as caught:
        call()
    assert isinstance(caught.value, tq.TransferQueueError)
    assert tq.get_client().get_partition_list() == before
