"""Short blocking calls on connections of the calling thread: whatever happens to these, each call takes effect once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import transfer_queue as tq
from tests.integration.stack import Stack, running_stack
from tests.waiting import wait_until
from transfer_queue.client.connection_pool import ConnectionPool
from transfer_queue.control.commands import Commit
from transfer_queue.runtime.blocking import BlockingConnection
from transfer_queue.wire.messages import Put


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack(units=1, capacity="32Mi") as running:
        yield running


@pytest.fixture
def pool(stack: Stack) -> Iterator[ConnectionPool]:
    """The pool of a client of this process, with one entry."""
    tq.init({"controller": {"addresses": [stack.address]}})
    found: ConnectionPool = tq.get_client().engine._pool  # type: ignore[union-attr]
    for number in range(40):
        tq.kv_put(f"warm{number}", "warm", {"x": torch.tensor([number])})
    assert len(found._all) == 1
    yield found
    tq.get_client().clear_partition("warm")
    tq.get_client().clear_partition("p")
    wait_until(lambda: stack.used() == 0, "nothing is left in storage")
    tq.close()


def test_what_an_interrupted_call_did_not_give_back_is_closed_and_replaced(
    pool: ConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer_queue.client.connection_pool._LOST_S", 1.0)
    lost = pool._take()
    assert lost is not None
    wait_until(lambda: lost not in pool._all and lost.controller.closed, "the entry is closed", 20)
    for number in range(40):
        tq.kv_put(f"k{number}", "p", {"x": torch.tensor([number])})
    assert len(pool._all) == 1


def value(key: str) -> int:
    return int(tq.kv_batch_get(key, "p", layout="dense")["x"])


def before(monkeypatch: pytest.MonkeyPatch, kind: type, act: Callable[[BlockingConnection], None], sent: bool) -> None:
    """``act`` once, before the first request of a kind is sent, or after the answer to it came."""
    real, done = BlockingConnection.request, []

    def request(self: BlockingConnection, message: Any, *arguments: Any, **options: Any) -> Any:
        first = isinstance(message, kind) and not done
        if first:
            done.append(message)
        if first and not sent:
            act(self)
        answer = real(self, message, *arguments, **options)
        if first and sent:
            act(self)
        return answer

    monkeypatch.setattr(BlockingConnection, "request", request)


def test_threads_have_connections_of_their_own_and_see_what_others_put(pool: ConnectionPool) -> None:
    def work(thread: int) -> None:
        for number in range(50):
            tq.kv_put(f"{thread}.{number}", "p", {"x": torch.tensor([100 * thread + number])})
            assert value(f"{thread}.{number}") == 100 * thread + number

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = tq.kv_batch_get([f"{thread}.{number}" for thread in range(12) for number in range(50)], "p", layout="dense")
    assert got["x"].flatten().tolist() == [100 * thread + number for thread in range(12) for number in range(50)]
    assert 1 < len(pool._all) <= 8
    wait_until(lambda: not pool._all, "idle connections are closed")


@pytest.mark.parametrize("sent", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", [Put, Commit])
def test_a_pooled_connection_that_breaks_costs_nothing(
    pool: ConnectionPool, monkeypatch: pytest.MonkeyPatch, kind: type, sent: bool
) -> None:
    def broken(connection: BlockingConnection) -> None:
        connection.close()
        if sent:
            raise tq.errors.ConnectionLostError("the answer is lost")

    before(monkeypatch, kind, broken, sent)
    tq.kv_put("a", "p", {"x": torch.tensor([7])}, tag={"n": 1})
    assert value("a") == 7
    assert list(tq.kv_list("p")["p"].items()) == [("a", {"n": 1})]


@pytest.mark.parametrize("sent", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", [Put, Commit])
def test_an_interrupted_put_leaves_nothing_or_a_whole_row(
    pool: ConnectionPool, monkeypatch: pytest.MonkeyPatch, kind: type, sent: bool
) -> None:
    def interrupted(connection: BlockingConnection) -> None:
        connection.close()
        raise KeyboardInterrupt

    before(monkeypatch, kind, interrupted, sent)
    with pytest.raises(KeyboardInterrupt):
        tq.kv_put("a", "p", {"x": torch.tensor([7])})
    if kind is Commit:
        wait_until(lambda: tq.kv_list("p"), "the commit is seen through")
        assert value("a") == 7


def test_a_controller_that_is_stopped_for_longer_than_the_pool_waits_commits_once(
    stack: Stack, pool: ConnectionPool
) -> None:
    stack.controller.process.send_signal(signal.SIGSTOP)
    resume = threading.Timer(1.5, stack.controller.process.send_signal, (signal.SIGCONT,))
    resume.start()
    tq.get_client().put({"x": torch.tensor([1, 2])}, partition_id="p")
    resume.join()
    assert tq.get_client().get_meta(["x"], 2, "p", mode="force_fetch").size == 2


def test_a_row_that_is_overwritten_by_others_is_read_as_it_is_now(pool: ConnectionPool) -> None:
    for number in range(200):
        tq.kv_put("a", "p", {"x": torch.tensor([number])})
        assert value("a") == number
