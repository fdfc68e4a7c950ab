from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import transfer_queue as tq
from tests.integration.mooncake.clients import client
from tests.integration.mooncake.conftest import MIB, Unit, settings_of
from transfer_queue.columns.tensors import encode
from transfer_queue.storage.base import BlockRead
from transfer_queue.storage.conformance.servers import Servers
from transfer_queue.storage.mooncake.admin import Admin
from transfer_queue.storage.mooncake.master import MasterEndpoints
from transfer_queue.storage.registry import backend_servers

SMALL_PARTS = {"zeroCopy": {"tensorBufferSize": "12Mi", "bytesBufferSize": "12Mi", "controllerTensorBufferSize": "2Mi"}}


@pytest.mark.parametrize("changes", [{}, SMALL_PARTS], ids=["one-value", "in-parts"])
async def test_some_fields_of_a_large_block_move_little_more_than_their_bytes(
    master: MasterEndpoints, units: list[Unit], run: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = encode({"large": torch.randn(64, 40_000), "a": torch.arange(64), "text": [f"row {n}" for n in range(64)]})
    async with client(settings_of(master, **changes), run) as backend:
        await backend.put(block, 1, units[0].info, wait_s=5)
        moved: list[int] = []
        read_ranges = backend._store.read_ranges

        def counting(keys: Any, targets: Any, ranges: Any) -> list[int]:
            moved.extend(stop - start for each in ranges for start, stop in each)
            return read_ranges(keys, targets, ranges)

        def whole(keys: Any, targets: Any) -> list[int]:
            raise AssertionError(f"{keys} are read whole")

        monkeypatch.setattr(backend._store, "read_ranges", counting)
        monkeypatch.setattr(backend._store, "read", whole)
        wanted = [(["a", "text"], None), (["large"], (60, 64))]
        reads = [BlockRead(units[0].info, 1, fields, rows, block.nbytes) for fields, rows in wanted]
        fetched = await backend.get(reads, timeout_s=30)
        for (fields, rows), found in zip(wanted, fetched.blocks, strict=True):
            assert found.view.select(fields, found.rows).to_bytes() == block.select(fields, rows).to_bytes()
        fetched.release()
        assert block.nbytes > 9 * MIB
        assert sum(moved) < MIB
    units[0].ask("registered", 0, run)
    units[0].ask("free", [1])


@pytest.mark.timeout(300)
def test_hundred_thousand_small_rows_take_few_keys(tmp_path: Path) -> None:
    rows, fields, batch = 100_000, 3, 1000
    with backend_servers("mooncake", tmp_path) as settings:
        servers = Servers("mooncake", settings, tmp_path)
        try:
            tq.init({"controller": {"addresses": [servers.address]}})
            for start in range(0, rows, batch):
                numbers = torch.arange(start, start + batch)
                values = {"a": numbers, "b": numbers.float(), "c": numbers.to(torch.int16)}
                keys = [f"k{number}" for number in range(start, start + batch)]
                tq.kv_batch_put(keys, "p", tq_batch(values, batch))
            keys_in_master = len(Admin(settings["adminAddress"]).keys("tq/"))
            assert rows // batch <= keys_in_master <= rows * fields // 100
            assert tq.kv_batch_get(["k77777"], "p")["a"].tolist() == [77777]
        finally:
            tq.close()
            servers.stop()


def tq_batch(values: dict[str, torch.Tensor], rows: int) -> Any:
    from tensordict import TensorDict

    return TensorDict(values, batch_size=[rows])
