from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.etcd import running_etcd
from tests.integration.mooncake.clients import client
from tests.integration.mooncake.conftest import FREE_PORTS, MIB, Unit, block_of_bytes, settings_of
from transfer_queue.errors import StartError
from transfer_queue.storage.base import BlockRead
from transfer_queue.storage.mooncake.master import MasterEndpoints, MasterProcess
from transfer_queue.storage.mooncake.settings import MasterSettings, parse_settings
from transfer_queue.storage.mooncake.store import open_store

StartUnit = Callable[..., Unit]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as address:
        yield address


async def put_and_get(settings: dict[str, object], unit: Unit, run: str) -> None:
    block = block_of_bytes(2 * MIB)
    async with client(settings, run) as backend:
        await backend.put(block, 1, unit.info, wait_s=10)
        fetched = await backend.get([BlockRead(unit.info, 1)], timeout_s=30)
        assert bytes(fetched.blocks[0].view.select(None, None).to_bytes()) == bytes(block.to_bytes())
        fetched.release()


async def test_metadata_may_lie_in_etcd(master: MasterEndpoints, etcd: str, start_unit: StartUnit, run: str) -> None:
    settings = settings_of(master, metadataServer=f"etcd://{etcd}")
    await put_and_get(settings, start_unit(settings), run)


class RegisteredMaster(MasterProcess):
    """One of a group with high availability: etcd knows which of them leads."""

    etcd = ""

    def _launch(self, binary: str, flags: dict[str, object]) -> None:
        group = {"enable_ha": "true", "etcd_endpoints": self.etcd, "cluster_id": "mooncake_cluster"}
        super()._launch(binary, {**flags, **group})


async def test_master_is_found_through_a_list_of_etcd_members(
    etcd: str, start_unit: StartUnit, tmp_path: Path, run: str
) -> None:
    process = RegisteredMaster(MasterSettings(**FREE_PORTS), tmp_path / "master.log")
    process.etcd = etcd
    try:
        endpoints = process.start()
        settings = settings_of(endpoints, masterServerAddress=f"etcd://{etcd};{etcd}")
        await put_and_get(settings, start_unit(settings), run)
    finally:
        process.stop()


def test_etcd_that_knows_no_master_is_an_error_with_the_flags_to_set(master: MasterEndpoints, tmp_path: Path) -> None:
    with running_etcd(tmp_path) as empty, pytest.raises(StartError, match=r"--enable_ha=true and --etcd_endpoints"):
        open_store(parse_settings(settings_of(master, masterServerAddress=f"etcd://{empty}", startTimeout=0.3)), 0)
