"""A load into several controllers that is killed at any step: nobody gets a part of it."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import transfer_queue as tq
from tests import preloaded
from tests.integration.stack import ROOT
from tests.integration.test_shards import attached
from tests.waiting import wait_until
from transfer_queue.checkpoint.load import was_interrupted
from transfer_queue.checkpoint.saver import Saver
from transfer_queue.client.session import ControllerSession
from transfer_queue.config.processes import CheckpointConfig
from transfer_queue.config.running import CheckpointReport, read_report
from transfer_queue.control.directory import shard_of
from transfer_queue.errors import CapacityError, CheckpointError, RequestError
from transfer_queue.launch.local import LocalStack
from transfer_queue.wire.messages import Adopt

SHARDS = 2


@pytest.fixture(scope="module")
def partitions() -> list[str]:
    """One on each controller."""
    names = [f"p{number}" for number in range(20)]
    return [next(name for name in names if shard_of(name, SHARDS) == shard) for shard in range(SHARDS)]


@pytest.fixture
def stack(partitions: list[str], tmp_path: Path) -> Iterator[LocalStack]:
    """A queue whose checkpoint in ``tmp_path`` has other rows than it has now."""
    with attached(SHARDS) as stack:
        put(partitions, 1)
        tq.save_checkpoint(tmp_path / "saved")
        put(partitions, 2)
        yield stack


def put(partitions: list[str], value: int) -> None:
    for partition in partitions:
        tq.kv_put("k", partition, {"x": torch.tensor([value])})


def value(partition: str) -> int | None:
    """What a reader gets; None if it is refused."""
    with suppress(CheckpointError):
        return int(tq.kv_batch_get("k", partition)["x"][0])
    return None


def killed_at(step: int, stack: LocalStack, folder: Path) -> bool:
    """Whether a load was killed there; else it came to its end before."""
    command = [sys.executable, "-m", "tests.integration.killed_load", stack.controller_addresses[0]]
    code = preloaded.run([*command, str(folder / "saved"), str(step)], cwd=ROOT).returncode
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_a_load_killed_at_any_step_leaves_no_part_of_it_and_a_new_one_starts_over(
    stack: LocalStack, partitions: list[str], tmp_path: Path
) -> None:
    for step in itertools.count():
        if not killed_at(step, stack, tmp_path):
            break
        wait_until(lambda step=step: was_interrupted(tq.get_client()) or step == 0, "its end is known")
        found = {value(partition) for partition in partitions}
        assert len(found - {None}) <= 1, "some rows of the checkpoint beside others"
        if step == 0:
            assert found == {2}, "nothing has happened yet"
            continue
        assert None in found
        with pytest.raises(CheckpointError, match=r"interrupted .* load the checkpoint again"):
            tq.kv_list()
        tq.load_checkpoint(tmp_path / "saved", replace=False)
        assert [value(partition) for partition in partitions] == [1] * SHARDS
        put(partitions, 2)
    assert step == 3 * SHARDS
    assert [value(partition) for partition in partitions] == [1] * SHARDS


def test_a_load_that_fails_halfway_refuses_those_who_waited_for_it_and_all_until_the_next_one(
    stack: LocalStack, partitions: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = ControllerSession.transfer
    states = itertools.count()
    waiting: list[Future[int | None]] = []

    async def failing(session: ControllerSession, message: Any, *rest: Any) -> Any:
        if isinstance(message, Adopt) and not message.step and next(states) == 1:
            waiting.append(pool.submit(value, partitions[0]))
            raise CapacityError("planted")
        return await transfer(session, message, *rest)

    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        patch.setattr(ControllerSession, "transfer", failing)
        with pytest.raises(CheckpointError, match=f"1 of {SHARDS} controllers have taken over .* planted"):
            tq.load_checkpoint(tmp_path / "saved")
        assert waiting[0].result(60) is None
    assert [value(partition) for partition in partitions] == [None] * SHARDS
    with pytest.raises(RequestError, match="its load was interrupted"):
        tq.save_checkpoint(tmp_path / "part")
    tq.load_checkpoint(tmp_path / "saved", replace=False)
    assert [value(partition) for partition in partitions] == [1] * SHARDS


def test_an_interrupt_while_a_controller_takes_over_its_part_leaves_no_part_of_it(
    stack: LocalStack, partitions: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = ControllerSession.transfer

    async def interrupted(session: ControllerSession, message: Any, *rest: Any) -> Any:
        answer = await transfer(session, message, *rest)
        if isinstance(message, Adopt) and not message.step:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.sleep(60)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(ControllerSession, "transfer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tq.load_checkpoint(tmp_path / "saved")
    assert [value(partition) for partition in partitions] == [None] * SHARDS
    tq.load_checkpoint(tmp_path / "saved", replace=False)
    assert [value(partition) for partition in partitions] == [1] * SHARDS


def test_a_load_goes_on_when_a_pooled_connection_of_its_process_is_closed(
    stack: LocalStack, partitions: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = ControllerSession.transfer
    engines = tq.get_client().engine.engines  # type: ignore[union-attr]
    for _ in range(40):
        put(partitions, 2)
    pooled = [each for engine in engines for each in engine._pool._all]
    assert pooled

    async def tidied(session: ControllerSession, message: Any, *rest: Any) -> Any:
        if isinstance(message, Adopt) and not message.step:
            for each in pooled:
                each.close()
            await asyncio.sleep(0.3)
        return await transfer(session, message, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(ControllerSession, "transfer", tidied)
        tq.load_checkpoint(tmp_path / "saved")
    assert [value(partition) for partition in partitions] == [1] * SHARDS


def test_a_restore_that_was_killed_starts_over(stack: LocalStack, partitions: list[str], tmp_path: Path) -> None:
    assert killed_at(SHARDS + 1, stack, tmp_path)
    wait_until(lambda: was_interrupted(tq.get_client()), "its end is known")
    status = tmp_path / "status.json"
    status.write_bytes(msgspec.json.encode(CheckpointReport(restoring=True)))
    settings = {"attach": stack.attach_config.dump(), "restoreFrom": str(tmp_path / "saved"), "units": 1}
    Saver(CheckpointConfig.model_validate({**settings, "statusFile": str(status)})).run()
    restored = (read_report(status) or CheckpointReport()).restored
    assert restored
    assert restored.loaded
    assert [value(partition) for partition in partitions] == [1] * SHARDS
