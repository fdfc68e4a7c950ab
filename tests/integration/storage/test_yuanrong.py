from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.etcd import running_etcd
from tests.integration.queue_command import free_ports
from tests.integration.test_checkpoint_object_store import brought_up, last_checkpoint
from tests.waiting import wait_until
from transfer_queue.errors import ConfigError, StartError, TransferQueueError
from transfer_queue.storage.conformance.servers import Servers
from transfer_queue.storage.yuanrong.testing import worker
from transfer_queue.storage.yuanrong.worker import open_worker, parse_settings

pytestmark = pytest.mark.timeout(400)


def _values(start: int) -> TensorDict:
    return TensorDict({"x": torch.arange(start, start + 4)}, batch_size=[4])


def _fails(keys: list[str]) -> bool:
    try:
        tq.kv_batch_get(keys, "p")
    except TransferQueueError:
        return True
    return False


def _stores(keys: list[str]) -> bool:
    try:
        tq.kv_batch_put(keys, "p", _values(10))
    except TransferQueueError:
        return False
    return True


def test_restarted_worker_means_lost_rows_and_a_queue_that_goes_on(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    old, new = list("abcd"), list("efgh")
    with ExitStack() as running:
        etcd = running.enter_context(running_etcd(tmp_path))
        with worker(tmp_path, port, etcd):
            servers = Servers("yuanrong", {"worker": f"127.0.0.1:{port}", "requestTimeout": 5}, tmp_path)
            running.callback(servers.stop)
            tq.init({"controller": {"addresses": [servers.address]}})
            running.callback(tq.close)
            tq.kv_batch_put(old, "p", _values(0))
            assert tq.kv_batch_get(old, "p")["x"].tolist() == [0, 1, 2, 3]
        with worker(tmp_path, port, etcd):
            wait_until(lambda: _fails(old), "the loss is reported", 120)
            wait_until(lambda: _stores(new), "new rows are stored", 120)
            wait_until(lambda: not _fails(new), "new rows are readable", 120)
            assert tq.kv_batch_get(new, "p")["x"].tolist() == [10, 11, 12, 13]
            assert _fails(old)


def test_tq_up_encrypts_saves_and_restores_a_queue_on_a_worker(tmp_path: Path) -> None:
    port = free_ports(1)
    spec: dict[str, Any] = {"security": {"tls": {"mode": "operator"}}}
    saves = {"schedule": "1s", "destination": str(tmp_path / "series")}
    with ExitStack() as running:
        etcd = running.enter_context(running_etcd(tmp_path))
        running.enter_context(worker(tmp_path, port, etcd))
        backend = {"yuanrong": {"worker": f"127.0.0.1:{port}", "requestTimeout": 5}}
        with brought_up(tmp_path / "a", backend, checkpoint=saves, **spec) as queue:
            tq.kv_batch_put(list("abcd"), "p", _values(7))
            wait_until(lambda: last_checkpoint(queue).rows == 4, "they are saved", 120)
        with brought_up(tmp_path / "b", backend, restoreFrom=saves["destination"], **spec) as queue:
            assert "loaded 4 rows" in queue.said
            assert tq.get_client().config.security.tls is not None
            assert tq.kv_batch_get(list("abcd"), "p")["x"].tolist() == [7, 8, 9, 10]


def test_worker_that_cannot_be_reached_is_named() -> None:
    settings = parse_settings({"requestTimeout": 1})
    with pytest.raises(StartError, match=r"worker at 127\.0\.0\.1:1 cannot be reached.*dscli start.*setting worker"):
        open_worker("127.0.0.1:1", settings)


def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yr.datasystem", None)
    with pytest.raises(StartError, match=r"pip install 'TransferQueue\[yuanrong\]'"):
        open_worker("127.0.0.1:1", parse_settings({}))


def test_worker_of_the_environment_wins_and_a_wrong_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_YUANRONG_WORKER", "10.0.0.7:31501")
    assert parse_settings({"worker": "head:1"}).worker == "10.0.0.7:31501"
    monkeypatch.delenv("TQ_YUANRONG_WORKER")
    with pytest.raises(ConfigError, match="backend yuanrong: worker"):
        parse_settings({"worker": "head"})
