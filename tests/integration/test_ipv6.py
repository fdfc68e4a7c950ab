"""A queue whose servers are told ``0.0.0.0``, as on a cluster, is reached over IPv6 and over IPv4."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import preloaded
from tests.integration.mooncake.conftest import FREE_PORTS, settings_of
from tests.integration.stack import ROOT, Stack, running_stack
from transfer_queue.storage.mooncake.master import MasterProcess
from transfer_queue.storage.mooncake.settings import MasterSettings

EVERYWHERE = {"host": "0.0.0.0", "advertiseHost": "::1"}
PROGRAM = """
import sys, torch, transfer_queue as tq
from tensordict import TensorDict
tq.init({"controller": {"addresses": [sys.argv[1]]}})
tq.kv_batch_put(keys=["a", "b"], partition_id="p", fields=TensorDict({"x": torch.arange(200000).view(2, -1)}, [2]))
print(int(tq.kv_batch_get(["a", "b"], "p", layout="dense")["x"].sum()))
tq.close()
"""


def put_and_get(stack: Stack) -> None:
    """In a process of its own: Mooncake's engine decides for one family when it is loaded."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, stack.address]
    done = preloaded.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == f"{sum(range(200000))}\n", done.stderr[-3000:]


def test_a_queue_is_reached_over_both_families() -> None:
    with running_stack(units=1, settings={"sharedMemory": False}, listen=EVERYWHERE) as stack:
        for address in (stack.address, *(unit.ready["address"] for unit in stack.units)):
            assert address.startswith("[::1]:")
            socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1])), timeout=10).close()
        assert stack.controller.http("/healthz")[0] == 200
        put_and_get(stack)


def test_rows_go_to_and_fro_through_mooncake_over_ipv6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC_TCP_BIND_ADDRESS", raising=False)
    master = MasterProcess(MasterSettings(**FREE_PORTS, host="::1"), tmp_path / "master.log")
    try:
        settings: dict[str, Any] = settings_of(master.start())
        assert settings["masterServerAddress"].startswith("[::1]:")
        backend = {"kind": "mooncake", "settings": settings}
        with running_stack(units=1, capacity="256Mi", backend=backend, listen=EVERYWHERE) as stack:
            put_and_get(stack)
    finally:
        master.stop()
