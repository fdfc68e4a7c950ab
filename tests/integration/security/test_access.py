"""A tenant with good credentials for another prefix: every request is refused, and nothing of others is seen."""

from __future__ import annotations

import asyncio
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.integration.security.authority import Authority, policy_file, token_files
from tests.integration.security.peers import as_peer
from tests.integration.security.servers import Servers, running
from transfer_queue.client.moving import move_partition
from transfer_queue.control import commands
from transfer_queue.control.directory import shard_of, writer_bits
from transfer_queue.errors import NotAuthorizedError, TransferQueueError
from transfer_queue.runtime.connection import Connection
from transfer_queue.wire import messages as wire
from transfer_queue.wire import moves

ROWS = torch.arange(60, dtype=torch.float32).reshape(20, 3)


class Tenants(NamedTuple):
    servers: Servers
    folder: Path
    security: dict[str, dict[str, Any]]
    """Of each principal."""
    block: int
    """A block of tenant a."""
    index: int
    """A row of tenant a."""


@pytest.fixture(scope="module", params=["certificates", "tokens"])
def tenants(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp(request.param)
    names = ("a", "b", "reader", "root", "storage")
    if request.param == "tokens":
        common: dict[str, Any] = {"tokensFile": token_files(folder)}
        security = {name: {"tokenFile": str(folder / f"{name}.token")} for name in names}
    else:
        authority = Authority(folder)
        common = {}
        security = {name: {"tls": authority.issue(name)} for name in names}
    common["policyFile"] = policy_file(folder)
    with running(folder, {**security["storage"], **common}) as servers:
        with servers.client(**security["a"]) as client:
            client.put(TensorDict({"x": ROWS}, batch_size=[20]), partition_id="a/secret")

        async def find(connection: Connection, _: Any) -> tuple[int, int]:
            found, _payload = await connection.request(commands.Lookup("a/secret", fields=["x"]), timeout_s=60)
            return found.locations[0].blocks[0], int(np.frombuffer(found.indexes, "<i8")[0])

        block, index = as_peer(servers, security["a"], find)
        yield Tenants(servers, folder, security, block, index)


_INDEX = np.array([0], "<i8").tobytes()
CONTROLLER_REQUESTS: dict[str, Callable[[str], Any]] = {
    "Commit": lambda partition: commands.Commit(partition, append=1),
    "Lookup": lambda partition: commands.Lookup(partition),
    "Fetch": lambda partition: commands.Fetch(partition, fields=["x"], batch_size=1, task="t"),
    "SetTags": lambda partition: commands.SetTags(partition, _INDEX, [{"n": 1}]),
    "Clear": lambda partition: commands.Clear(partition),
    "ResetConsumption": lambda partition: commands.ResetConsumption(partition),
    "ListKeys": lambda partition: commands.ListKeys(partition),
    "KeysOf": lambda partition: commands.KeysOf(partition, _INDEX),
    "ProductionStatus": lambda partition: commands.ProductionStatus(partition, ["x"]),
    "ConsumptionStatus": lambda partition: commands.ConsumptionStatus(partition, "t"),
    "Snapshot": lambda partition: commands.Snapshot(partition),
    "Capture": lambda partition: wire.Capture(),
    "Resume": lambda partition: wire.Resume(),
    "EndCapture": lambda partition: wire.EndCapture(),
    "Adopt": lambda partition: wire.Adopt(),
    "Look": lambda partition: wire.Look(),
    "Trace": lambda partition: wire.Trace(1),
    "Lock": lambda partition: commands.Lock(partition, ["k"]),
    "RenewLock": lambda partition: commands.RenewLock(partition, 1),
    "Acknowledge": lambda partition: commands.Acknowledge(partition, "t", _INDEX),
    "Drain": lambda partition: wire.Drain("u0"),
    "Relocate": lambda partition: wire.Relocate(0, []),
    "Retire": lambda partition: wire.Retire(0),
    "Export": lambda partition: moves.Export(partition),
    "StopExport": lambda partition: moves.StopExport(partition),
    "Receive": lambda partition: moves.Receive(partition, "seal", 0),
    "Leave": lambda partition: moves.Leave(partition, "seal", 1),
    "Settle": lambda partition: moves.Settle(partition, "proof"),
    "Dismiss": lambda partition: moves.Dismiss(partition, "seal"),
    "ListMoves": lambda partition: moves.ListMoves(),
}
UNIT_REQUESTS: dict[str, Callable[[int, str], Any]] = {
    "Put": lambda block, scope: wire.Put(block, 0.0, scope),
    "Alloc": lambda block, scope: wire.Alloc(block, 10, 0.0, scope),
    "Fill": lambda block, scope: wire.Fill(block),
    "Seal": lambda block, scope: wire.Seal(block),
    "Read": lambda block, scope: wire.Read([wire.ReadPart(block)]),
    "Open": lambda block, scope: wire.Open([block]),
    "MapDevice": lambda block, scope: wire.MapDevice(),
    "Sweep": lambda block, scope: wire.Sweep(),
}
OTHERWISE_TESTED = {
    "Hello", "Announce", "Cancel", "Holding", "Join", "UnitReport", "ReportOrphans", "ListPartitions", "Abort",
    "Release", "Stats",
}  # fmt: skip
"""Handshakes, notices about what is the sender's own, and what shows nothing of others."""


def test_the_tables_here_name_every_request_there_is() -> None:
    requests = {*typing.get_args(wire.ControllerRequest), *typing.get_args(wire.UnitRequest)}
    assert {kind.__name__ for kind in requests} == {*CONTROLLER_REQUESTS, *UNIT_REQUESTS} | OTHERWISE_TESTED


@pytest.mark.parametrize("name", CONTROLLER_REQUESTS)
def test_the_controller_refuses_another_tenant(tenants: Tenants, name: str) -> None:
    async def ask(connection: Connection, _: Any) -> None:
        await connection.request(CONTROLLER_REQUESTS[name]("a/secret"), timeout_s=60)

    with pytest.raises(NotAuthorizedError) as caught:
        as_peer(tenants.servers, tenants.security["b"], ask)
    assert isinstance(caught.value, PermissionError)
    for part in ("'b'", name, "'b/'"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", UNIT_REQUESTS)
def test_a_storage_unit_refuses_another_tenant(tenants: Tenants, name: str) -> None:
    async def ask(connection: Connection, welcome: Any) -> None:
        block = (welcome.writer << 32) | 1 if name in ("Put", "Alloc") else tenants.block
        payload = [b"x" * 10] if name in ("Put", "Fill") else []
        await connection.request(UNIT_REQUESTS[name](block, "a/secret"), payload, timeout_s=60)

    with pytest.raises(NotAuthorizedError, match="'b' may not do"):
        as_peer(tenants.servers, tenants.security["b"], ask, unit=True)


@pytest.mark.parametrize("name", ["Commit", "SetTags"])
def test_a_consumer_may_not_produce(tenants: Tenants, name: str) -> None:
    async def ask(connection: Connection, _: Any) -> None:
        await connection.request(CONTROLLER_REQUESTS[name]("a/secret"), timeout_s=60)

    with pytest.raises(NotAuthorizedError, match="role admin or producer"):
        as_peer(tenants.servers, tenants.security["reader"], ask)


def test_tenants_use_their_own_partitions_and_see_only_those(tenants: Tenants) -> None:
    seen = {}
    for name in ("a", "b", "root"):
        with tenants.servers.client(**tenants.security[name]) as client:
            if name == "b":
                client.put(TensorDict({"x": ROWS + 1}, batch_size=[20]), partition_id="b/own")
                meta = client.get_meta(["x"], 20, "b/own", task_name="t")
                assert torch.equal(torch.as_tensor(client.get_data(meta)["x"]), ROWS + 1)
            seen[name] = sorted(client.get_partition_list())
            assert sorted(client.kv_list()) == sorted(client.kv_list())
            assert set(client.kv_list()) <= set(seen[name])
    assert seen == {"a": ["a/secret"], "b": ["b/own"], "root": ["a/secret", "b/own"]}


def test_a_reader_and_an_administrator_read_what_the_tenant_wrote(tenants: Tenants) -> None:
    for name in ("reader", "root"):
        with tenants.servers.client(**tenants.security[name]) as client:
            meta = client.get_meta(["x"], 20, "a/secret", task_name=f"task of {name}")
            assert torch.equal(torch.as_tensor(client.get_data(meta)["x"]), ROWS)


def test_a_guessed_row_of_another_tenant_is_not_found_in_the_own_partition(tenants: Tenants) -> None:
    async def guess(connection: Connection, _: Any) -> None:
        await connection.request(commands.Commit("b/guess", append=1), timeout_s=60)
        wanted = np.array([tenants.index], "<i8").tobytes()
        await connection.request(commands.Lookup("b/guess", indexes=wanted), timeout_s=60)

    with pytest.raises(TransferQueueError, match=r"(?i)not|gone|exist"):
        as_peer(tenants.servers, tenants.security["b"], guess)


def test_a_tenant_cannot_pose_as_another_writer_at_a_storage_unit(tenants: Tenants) -> None:
    async def never(connection: Connection, _: Any) -> None:
        raise AssertionError("admitted")

    with pytest.raises(NotAuthorizedError, match="is not writer"):
        as_peer(tenants.servers, tenants.security["b"], never, unit=True, writer=tenants.block >> 32)


def test_a_tenant_cannot_resume_the_session_of_another(tenants: Tenants) -> None:
    async def session(connection: Connection, welcome: Any) -> tuple[int, str, bool]:
        return welcome.writer, welcome.run, welcome.resumed

    writer, run, _ = as_peer(tenants.servers, tenants.security["a"], session)
    assert not as_peer(tenants.servers, tenants.security["b"], session, writer=writer, run=run)[2]
    assert as_peer(tenants.servers, tenants.security["a"], session, writer=writer, run=run)[2]


def test_a_tenant_cannot_join_as_a_storage_unit(tenants: Tenants) -> None:
    async def never(connection: Connection, _: Any) -> None:
        raise AssertionError("admitted")

    with pytest.raises(NotAuthorizedError, match="Join"):
        as_peer(tenants.servers, tenants.security["b"], never, role="unit")


def test_an_abort_of_another_tenants_block_is_ignored(tenants: Tenants) -> None:
    async def abort(connection: Connection, _: Any) -> None:
        connection.send(wire.Abort(tenants.block))
        await connection.request(wire.Stats(), timeout_s=60)

    as_peer(tenants.servers, tenants.security["b"], abort, unit=True)

    async def read(connection: Connection, _: Any) -> int:
        reply, _payload = await connection.request(wire.Read([wire.ReadPart(tenants.block)]), timeout_s=60)
        return sum(reply.sizes)

    assert as_peer(tenants.servers, tenants.security["a"], read, unit=True) > 0


def test_a_limited_tenant_gets_no_shared_memory_and_no_recycled_bytes(tenants: Tenants) -> None:
    async def seal(connection: Connection, welcome: Any) -> None:
        assert "path" not in connection.welcome.attributes
        block = (welcome.writer << 32) | 1
        await connection.request(wire.Alloc(block, 100_000, 0.0, "b/own"), timeout_s=60)
        await connection.request(wire.Seal(block), timeout_s=60)

    with pytest.raises(NotAuthorizedError, match="shared memory"):
        as_peer(tenants.servers, tenants.security["b"], seal, unit=True)


def test_the_pages_with_keys_are_off_where_access_is_limited(tenants: Tenants) -> None:
    assert tenants.servers.controller.http("/api/dataflow")[0] == 404
    assert tenants.servers.controller.http("/healthz")[0] == 200


def test_tenants_of_several_controllers_are_kept_apart(tmp_path: Path) -> None:
    tokens = {"tokensFile": token_files(tmp_path), "policyFile": policy_file(tmp_path)}
    security = {name: {"tokenFile": str(tmp_path / f"{name}.token")} for name in ("a", "b", "root", "storage")}
    own, other = (
        [next(f"{who}/{n}" for n in range(99) if shard_of(f"{who}/{n}", 2) == k) for k in (0, 1)] for who in "ab"
    )
    with running(tmp_path, {**security["storage"], **tokens}, shards=2, durability="process") as servers:
        for name, partitions in (("a", own), ("b", other)):
            with servers.client(**security[name]) as client:
                for partition in partitions:
                    client.put(TensorDict({"x": ROWS}, batch_size=[20]), partition_id=partition)
                    meta = client.get_meta(["x"], 20, partition, task_name="t")
                    assert torch.equal(torch.as_tensor(client.get_data(meta)["x"]), ROWS)
                assert sorted(client.get_partition_list()) == partitions
                assert set(client.kv_list()) <= set(partitions)
        with servers.client(**security["root"]) as client:
            assert sorted(client.get_partition_list()) == sorted(own + other)
        with servers.client(**security["b"]) as client:
            for partition in own:
                with pytest.raises(NotAuthorizedError, match="'b' may not do Fetch"):
                    client.get_meta(["x"], 20, partition, task_name="other")

        async def find(connection: Connection, welcome: Any) -> tuple[int, int]:
            found, _payload = await connection.request(commands.Lookup(own[0], fields=["x"]), timeout_s=60)
            return found.locations[0].blocks[0], welcome.writer

        block, _ = as_peer(servers, security["a"], find)

        async def read(connection: Connection, _: Any) -> None:
            await connection.request(wire.Read([wire.ReadPart(block)]), timeout_s=60)

        with pytest.raises(NotAuthorizedError, match="'b' may not do Read"):
            as_peer(servers, security["b"], read, unit=True)
        with pytest.raises(NotAuthorizedError, match="is not writer"):  # a number of the other controller
            as_peer(servers, security["b"], read, unit=True, writer=(1 << writer_bits(2)) + 1)

        root = servers.config(**security["root"]).security
        asyncio.run(move_partition([servers.address], other[1], 0, security=root))
        guests = [as_peer(servers, security[name], told) for name in "ab"]
        assert guests == [[], [other[1]]]


async def told(_: Connection, welcome: Any) -> list[str]:
    """The moved partitions that a controller tells a client of."""
    return list(welcome.attributes.get("guests", ()))


def test_a_policy_is_refused_with_a_backend_that_cannot_keep_tenants_apart(tmp_path: Path) -> None:
    from tests.integration.stack import Process

    config = {
        "port": 0,
        "metricsPort": None,
        "backend": {"kind": "mooncake"},
        "security": {"tokensFile": token_files(tmp_path), "policyFile": policy_file(tmp_path)},
    }
    process = Process("transfer_queue.runtime.controller", config, tmp_path, "controller")
    assert process.process.wait(60) == 1
    process._close_pipes()
    assert "use the simple backend" in process.log.read_text()
