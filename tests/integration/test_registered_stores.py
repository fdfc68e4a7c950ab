"""Rows of a queue in a store that a user plugged in through the registries of 0.1.x."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from tests import preloaded
from tests.integration import user_store
from tests.integration.stack import ROOT
from tests.waiting import wait_until
from transfer_queue.errors import ConfigError, RequestError


def batch(start: int, rows: int = 3) -> TensorDict:
    ragged = [torch.arange(start, start + n) for n in range(1, rows + 1)]
    return TensorDict(
        {
            "x": torch.arange(start, start + rows),
            "ids": torch.nested.as_nested_tensor(ragged, layout=torch.jagged),
            "text": NonTensorStack(*[f"ä{start + n}" for n in range(rows)]),
        },
        [rows],
    )


class Queue(NamedTuple):
    table: Any
    address: str


@pytest.fixture(scope="module")
def table() -> Iterator[Queue]:
    """A queue of this process whose rows lie in the user's table."""
    before = os.environ.pop("TQ_CONTROLLER_ADDRESS", None)
    merged = tq.init({"backend": {"storage_backend": "TableStore", "TableStore": {"note": "mine"}}})
    assert merged is not None
    address = merged.controller.zmq_info.address("request_handle_socket")
    yield Queue(user_store.Table(merged.backend.TableStore.folder), address)
    tq.close()
    shutil.rmtree(merged.backend.TableStore.folder)
    if before is not None:
        os.environ["TQ_CONTROLLER_ADDRESS"] = before


def in_another_process(table: Queue, code: str, *, wait: bool = True) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TQ_CONTROLLER_ADDRESS": table.address}
    process = preloaded.Popen(
        [sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if wait:
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
    return process


def test_rows_lie_in_the_users_store_until_they_are_cleared(table: Queue) -> None:
    tq.kv_batch_put(["a", "b", "c"], "p", batch(0))
    (key,) = table.table.keys()
    assert key.partition("@")[2].startswith("block-")
    tq.kv_batch_put(["b", "c"], "p", TensorDict({"reward": torch.tensor([1.0, 2.0])}, [2]))
    got = tq.kv_batch_get(["c", "a", "c"], "p", ["x", "ids", "text"])
    assert got["x"].tolist() == [2, 0, 2]
    assert [row.tolist() for row in got["ids"].unbind()] == [[0, 1, 2], [0], [0, 1, 2]]
    assert list(got["text"]) == ["ä2", "ä0", "ä2"]
    assert tq.kv_batch_get(["c", "b"], "p", "reward")["reward"].tolist() == [2.0, 1.0]
    tq.kv_put("a", "p", {"x": torch.tensor(7)})
    assert tq.kv_batch_get(["a", "b"], "p", "x")["x"].tolist() == [7, 1]
    assert len(table.table.keys()) == 3
    tq.kv_clear(["b", "c"], "p")
    wait_until(lambda: len(table.table.keys()) == 2, "the block that only b and c were in is removed")
    tq.kv_clear("a", "p")
    wait_until(lambda: table.table.keys() == [], "all are removed")


def test_the_low_level_calls_and_a_fetch_by_task_go_through_it(table: Queue) -> None:
    client = tq.get_client()
    client.initialize_storage_manager("TableStore", {"address": "as the queue has it"})
    client.put(batch(10), partition_id="low")
    meta = client.get_meta(["x", "ids"], 3, "low", task_name="t")
    assert client.get_data(meta)["x"].tolist() == [10, 11, 12]
    client.put(TensorDict({"y": torch.ones(3, 2)}, [3]), meta)
    assert len(table.table.keys()) == 2
    client.clear_partition("low")
    wait_until(lambda: table.table.keys() == [], "all are removed")


def test_other_processes_that_registered_it_read_and_write_and_their_rows_survive_them(table: Queue) -> None:
    tq.kv_batch_put(["a", "b", "c"], "shared", batch(0))
    in_another_process(
        table,
        "import torch, transfer_queue as tq\n"
        "from tests.integration import user_store\n"
        "assert tq.kv_batch_get(['b', 'c'], 'shared')['x'].tolist() == [1, 2]\n"
        "tq.kv_put('theirs', 'shared', {'x': torch.tensor(9)})\n",
    )
    assert tq.kv_batch_get(["theirs", "a"], "shared", "x")["x"].tolist() == [9, 0]
    tq.kv_clear(["theirs", "a", "b", "c"], "shared")
    wait_until(lambda: table.table.keys() == [], "those of the other process are removed too")


def test_what_a_killed_writer_had_not_committed_is_removed(table: Queue) -> None:
    writer = in_another_process(
        table,
        "import os, torch, transfer_queue as tq\n"
        "from tests.integration import user_store\n"
        "tq.kv_put('whole', 'killed', {'x': torch.tensor(1)})\n"
        "put = user_store.TableClient.put\n"
        "def last(self, keys, values):\n"
        "    put(self, keys, values)\n"
        "    print('stored', flush=True)\n"
        "    import time; time.sleep(60)\n"
        "user_store.TableClient.put = last\n"
        "tq.kv_put('never', 'killed', {'x': torch.tensor(2)})\n",
        wait=False,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "stored\n"
    assert len(table.table.keys()) == 2
    assert tq.kv_batch_get("whole", "killed")["x"].tolist() == [1]  # connects this process to the unit
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert tq.kv_batch_get("whole", "killed")["x"].tolist() == [1]
    assert list(tq.kv_list("killed")["killed"]) == ["whole"]
    tq.kv_clear("whole", "killed")
    wait_until(lambda: len(table.table.keys()) <= 1, "the committed one is removed")
    for key in table.table.keys():  # noqa: SIM118 - what is left has no note, as its writer never got to leave one
        table.table.clear([key])


def test_a_process_that_has_not_registered_it_is_told_what_to_import(table: Queue) -> None:
    tq.kv_put("a", "told", {"x": torch.tensor(1)})
    in_another_process(
        table,
        "import transfer_queue as tq\n"
        "try:\n"
        "    tq.kv_batch_get('a', 'told')\n"
        "except tq.TransferQueueError as error:\n"
        "    assert isinstance(error, ValueError), error\n"
        "    assert 'TableStore' in str(error) and 'imported the module which registers it' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('read')\n",
    )
    tq.kv_clear("a", "told")
    wait_until(lambda: table.table.keys() == [], "all are removed")


def test_an_error_of_the_users_class_reaches_the_caller_and_leaves_no_trace(table: Queue) -> None:
    with pytest.raises(RequestError, match=r"TableStore.*OSError: the disk is on fire"):
        tq.kv_put("a", "error", {"x": torch.zeros(60_000_000, dtype=torch.uint8)})
    assert tq.kv_list("error") == {}
    tq.kv_put("a", "error", {"x": torch.tensor(1)})
    (key,) = table.table.keys()
    table.table.clear([key])
    with pytest.raises(KeyError, match="TableStore"):
        tq.kv_batch_get("a", "error")
    tq.kv_clear("a", "error")


def test_a_queue_and_another_manager_do_not_fit(table: Queue) -> None:
    for name in ("RowStore", "KVStorageManager"):
        with pytest.raises(ConfigError, match=f"in manager 'TableStore', not in '{name}'"):
            tq.get_client().initialize_storage_manager(name, {"client_name": "TableClient"})


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that is part of no queue."""
    monkeypatch.delenv("TQ_CONTROLLER_ADDRESS", raising=False)
    tq.close()
    yield
    tq.close()


def test_a_manager_of_another_kind_and_its_notification(alone: None) -> None:
    tq.init({"backend": {"storage_backend": "RowStore", "RowStore": {}}})
    tq.kv_batch_put(["a", "b", "c"], "p", batch(0))
    tq.kv_batch_put(["d", "e"], "p", batch(3, 2))
    assert len(user_store.RowManager.rows) == 2
    assert tq.kv_batch_get(["e", "a"], "p")["x"].tolist() == [4, 0]
    tq.kv_clear(["a", "b", "c", "d", "e"], "p")
    wait_until(lambda: not user_store.RowManager.rows, "all are removed")


@pytest.mark.parametrize(
    ("section", "text"),
    [({"file": open(os.devnull)}, "must be plain"), (5, "of type object")],  # noqa: SIM115 - it is what is wrong
)
def test_a_wrong_section_is_refused_before_anything_starts(alone: None, section: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"backend\.RowStore.*{text}"):
        tq.init({"backend": {"storage_backend": "RowStore", "RowStore": section}})


def test_a_bootstrap_that_fails_is_named(alone: None) -> None:
    from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider

    @StorageBootstrapProvider.register_provider("RowStore")
    def start(conf: Any) -> None:
        raise OSError("no such switch")

    try:
        with pytest.raises(RuntimeError, match=r"bootstrap of backend 'RowStore' failed: OSError: no such switch"):
            tq.init({"backend": {"storage_backend": "RowStore", "RowStore": {}}})
    finally:
        del StorageBootstrapProvider._providers["rowstore"]
