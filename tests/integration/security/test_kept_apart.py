"""Tenants stay apart when blocks outlive their unit, move to another, or come from a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.security.authority import policy_file, token_files
from tests.integration.security.peers import as_peer
from tests.integration.stack import ROOT, Stack, running_stack
from transfer_queue.config.attach import AttachConfig
from transfer_queue.config.document import validate_document
from transfer_queue.control import commands
from transfer_queue.errors import NotAuthorizedError
from transfer_queue.runtime.connection import Connection
from transfer_queue.wire import messages as wire

WIDTHS = {"a/inline": 4, "a/large, of a name that is longer than a record": 50_000}
"""Of the rows of tenant a in each partition."""


class Queue(NamedTuple):
    stack: Stack
    folder: Path

    def settings(self, name: str) -> dict[str, Any]:
        security = {"tokenFile": str(self.folder / f"{name}.token")}
        return {"layout": "dense", "controller": {"addresses": [self.stack.address]}, "security": security}

    def client(self, name: str) -> tq.TransferQueueClient:
        return tq.TransferQueueClient(name, validate_document(AttachConfig, self.settings(name), "test"))

    def put(self) -> None:
        client = self.client("a")
        for partition, width in WIDTHS.items():
            for number in range(2):
                rows = torch.full((2, width), number)
                client.put(TensorDict({"x": rows}, batch_size=[2]), partition_id=partition)
        client.close()

    def check(self) -> None:
        """Tenant a reads its rows; tenant b is refused each of their blocks."""
        client = self.client("a")
        for partition, width in WIDTHS.items():
            meta = client.get_meta(["x"], 4, partition, task_name=f"{os.urandom(4).hex()}")
            expected = torch.arange(2).repeat_interleave(2)[:, None].expand(4, width)
            assert torch.equal(torch.as_tensor(client.get_data(meta)["x"]), expected)
            for unit, block in self.blocks(partition):
                with pytest.raises(NotAuthorizedError, match="'b' may not do Read"):
                    as_peer(
                        self.stack, self.settings("b")["security"], ask(wire.Read([wire.ReadPart(block)])), unit=unit
                    )
        client.close()

    def blocks(self, partition: str) -> list[tuple[str, int]]:
        """(unit's name, block)."""

        async def find(connection: Connection, welcome: Any) -> list[tuple[str, int]]:
            names = {info.unit: info.name for info in welcome.units}
            found, _ = await connection.request(commands.Lookup(partition, fields=["x"]), timeout_s=60)
            places = [pair for place in found.locations for pair in zip(place.units, place.blocks, strict=True)]
            return [(names[unit], block) for unit, block in places]

        found: list[tuple[str, int]] = as_peer(self.stack, self.settings("a")["security"], find)
        assert len(found) == 2
        return found

    def drain(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        token = str(self.folder / f"{name}.token")
        environ = {**os.environ, "TQ_CONTROLLER_ADDRESS": self.stack.address, "TQ_TOKEN_FILE": token}
        return run(["transfer_queue.cli", "drain", *words], environ)


def ask(request: Any) -> Any:
    async def asking(connection: Connection, _: Any) -> None:
        await connection.request(request, timeout_s=60)

    return asking


def run(words: list[str], environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Queue]:
    security = {
        "tokensFile": token_files(tmp_path),
        "tokenFile": str(tmp_path / "storage.token"),
        "policyFile": policy_file(tmp_path),
    }
    with running_stack(units=2, capacity="16Mi", security=security, durability=request.param) as stack:
        queue = Queue(stack, tmp_path)
        queue.put()
        yield queue


@pytest.mark.parametrize("queue", ["process", "node"], indirect=True)
def test_blocks_of_a_killed_unit_are_refused_to_another_tenant_when_it_is_back(queue: Queue) -> None:
    for process in [queue.stack.controller, *queue.stack.units]:
        process.kill()
    queue.stack.restart_controller()
    for unit in queue.stack.units:
        unit.spawn()
    for unit in queue.stack.units:
        unit.wait_ready()
    queue.check()


@pytest.mark.parametrize("queue", ["none"], indirect=True)
def test_an_administrator_drains_a_unit_and_moves_a_queue_and_tenants_stay_apart(queue: Queue) -> None:
    refused = queue.drain("a", "u0")
    assert refused.returncode == 1
    assert "may not do Drain" in " ".join(refused.stderr.split())
    done = queue.drain("root", "u0")
    assert done.returncode == 0, done.stderr
    assert {unit for partition in WIDTHS for unit, _ in queue.blocks(partition)} == {"u1"}
    queue.check()
    assert queue.drain("root", "u0", "--cancel").returncode == 0
    checkpoint = queue.folder / "checkpoint"
    tq.init(queue.settings("root"))
    try:
        tq.save_checkpoint(checkpoint)
        for partition in WIDTHS:
            tq.get_client().clear_partition(partition)
        tq.load_checkpoint(checkpoint)
    finally:
        tq.close()
    queue.check()


@pytest.mark.parametrize("queue", ["none"], indirect=True)
def test_the_hook_of_a_unit_drains_that_unit_and_its_principal_may_do_nothing_else(queue: Queue) -> None:
    storage = queue.settings("storage")["security"]
    for request in (
        commands.Lookup("a/inline"),
        commands.Clear("a/inline"),
        wire.Look(),
        commands.Snapshot("a/inline"),
        wire.Relocate(7, []),  # a unit that is not here
        wire.Retire(7),
    ):
        with pytest.raises(NotAuthorizedError, match="'storage' may not do"):
            as_peer(queue.stack, storage, ask(request))
    policy = json.loads((queue.folder / "policy.yaml").read_text())
    policy["principals"][1]["roles"] = ["storage"]  # units of another principal
    (queue.folder / "policy.yaml").write_text(json.dumps(policy))
    for request in (wire.Drain("u1"), wire.Relocate(1, []), wire.Retire(1)):
        with pytest.raises(NotAuthorizedError, match="'b' may not do"):
            as_peer(queue.stack, queue.settings("b")["security"], ask(request))
    policy["principals"][1]["roles"] = ["producer", "consumer"]
    (queue.folder / "policy.yaml").write_text(json.dumps(policy))
    done = run(["transfer_queue.client.draining", "--config", str(queue.stack.units[1].path)])
    assert done.returncode == 0, done.stderr
    assert {unit for partition in WIDTHS for unit, _ in queue.blocks(partition)} == {"u0"}
    queue.check()
