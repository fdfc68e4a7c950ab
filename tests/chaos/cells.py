"""The fault matrix: each cell does something to one part of a queue under load, and says when that is over."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests import preloaded
from tests.chaos.load import Load
from tests.chaos.proxy import Proxy
from tests.integration.stack import ROOT, Process, Stack
from tests.waiting import wait_until
from transfer_queue.errors import CapacityError
from transfer_queue.wire.messages import Kind

__all__ = ["CELLS", "Arena", "Cell", "wait_for_rows"]

HOLD_S = 1.0
"""How long a fault lasts that does not end by itself."""
DEADLINE_S = 120.0


@dataclass
class Arena:
    """``link`` is between clients and the controller, ``unit_link`` between storage units and the controller."""

    stack: Stack
    link: Proxy
    unit_link: Proxy
    load: Load


@dataclass(frozen=True)
class Cell:
    """``inflict`` returns when the fault is over. ``lease_s``, ``pause_s``, ``together``: of the load."""

    part: str
    fault: str
    inflict: Callable[[Arena], None]
    lease_s: float = 0.0
    pause_s: float = 0.0
    together: bool = False

    @property
    def name(self) -> str:
        return f"{self.part}: {self.fault}"


def hold() -> None:
    threading.Event().wait(HOLD_S)


def wait_for_rows(load: Load, more: int, what: str) -> None:
    wanted = len(load.delivered) + more
    wait_until(lambda: len(load.delivered) >= wanted or bool(load.errors), what, DEADLINE_S)


# ------------------------------------------------------------------------------------------------------------ processes


def _controller(arena: Arena) -> Process:
    return arena.stack.controller


def _unit(arena: Arena) -> Process:
    return arena.stack.units[0]


def _start_again(arena: Arena, process: Process) -> None:
    if process is arena.stack.controller:
        arena.stack.restart_controller()
    else:
        process.spawn()
        process.wait_ready(DEADLINE_S)


def _killed(part: Callable[[Arena], Process]) -> Callable[[Arena], None]:
    def inflict(arena: Arena) -> None:
        process = part(arena)
        process.kill()
        _start_again(arena, process)

    return inflict


def _restarted(part: Callable[[Arena], Process]) -> Callable[[Arena], None]:
    def inflict(arena: Arena) -> None:
        process = part(arena)
        process.stop()
        _start_again(arena, process)

    return inflict


def _stopped(part: Callable[[Arena], Process]) -> Callable[[Arena], None]:
    def inflict(arena: Arena) -> None:
        process = part(arena)
        process.process.send_signal(signal.SIGSTOP)
        hold()
        process.process.send_signal(signal.SIGCONT)

    return inflict


def _everything_killed(arena: Arena) -> None:
    processes = [*arena.stack.units, arena.stack.controller]
    for process in processes:
        process.kill()
    arena.stack.restart_controller()
    for unit in arena.stack.units:
        unit.spawn()
    for unit in arena.stack.units:
        unit.wait_ready(DEADLINE_S)


_VICTIM = """
import sys, transfer_queue as tq
client = tq.TransferQueueClient("victim", sys.argv[1])
meta = client.get_meta(["number", "x"], 8, sys.argv[2], task_name="train", timeout=120, lease=float(sys.argv[3]))
print(*meta.global_indexes, flush=True)
sys.stdin.readline()
client.ack(meta, "train")
print("acknowledged", flush=True)
"""
_VICTIM_LEASE_S = 2.0


def _victim(arena: Arena) -> tuple[subprocess.Popen[str], set[int]]:
    """A consumer that has not acknowledged the rows it has taken, and their indexes."""
    command = [sys.executable, "-c", _VICTIM, arena.link.address, arena.load.partition, str(_VICTIM_LEASE_S)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    victim = preloaded.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    assert victim.stdout is not None
    return victim, {int(index) for index in victim.stdout.readline().split()}


def _wait_for_return(arena: Arena, taken: set[int]) -> None:
    assert len(taken) == 8
    wait_until(lambda: taken <= arena.load.indexes, "what it had comes to others", DEADLINE_S)


def _consumer_killed(arena: Arena) -> None:
    victim, taken = _victim(arena)
    with victim:
        victim.kill()
    _wait_for_return(arena, taken)


def _consumer_stopped(arena: Arena) -> None:
    """Its lease runs out; what it acknowledges when it goes on does no harm."""
    victim, taken = _victim(arena)
    with victim:
        victim.send_signal(signal.SIGSTOP)
        _wait_for_return(arena, taken)
        victim.send_signal(signal.SIGCONT)
        assert victim.communicate("\n", timeout=DEADLINE_S)[0] == "acknowledged\n"


def _nothing(arena: Arena) -> None:
    wait_for_rows(arena.load, 100, "a slow consumer gets rows")


# -------------------------------------------------------------------------------------------------------------- network


def _delayed(link: Callable[[Arena], Proxy]) -> Callable[[Arena], None]:
    def inflict(arena: Arena) -> None:
        link(arena).delay_s = 0.2
        hold()
        link(arena).heal()

    return inflict


def _partitioned(link: Callable[[Arena], Proxy]) -> Callable[[Arena], None]:
    def inflict(arena: Arena) -> None:
        link(arena).held = True
        hold()
        link(arena).heal()

    return inflict


def _half_open(link: Callable[[Arena], Proxy]) -> Callable[[Arena], None]:
    return lambda arena: link(arena).freeze()


def _spoilt(link: Callable[[Arena], Proxy], times: int, **shares: float) -> Callable[[Arena], None]:
    """Until it happened so often that ``shares`` of what passes were spoilt. (What waits waits for the load.)"""

    def inflict(arena: Arena) -> None:
        proxy = link(arena)
        before = proxy.spoilt
        for name, share in shares.items():
            setattr(proxy, name, share)
        wait_until(lambda: proxy.spoilt >= before + times, f"{' and '.join(shares)} on the network", DEADLINE_S)
        proxy.heal()

    return inflict


def _disordered_notices(arena: Arena) -> None:
    arena.unit_link.kinds = {Kind.NOTICE}
    _spoilt(_unit_link, 20, duplicate=0.5, reorder=0.5)(arena)


def _link(arena: Arena) -> Proxy:
    return arena.link


def _unit_link(arena: Arena) -> Proxy:
    return arena.unit_link


# ------------------------------------------------------------------------------------------------------------ resources


_INDEX_BYTES = 2048
"""Less than an index has before it is rewritten, and room for a line of the log."""


def _no_room_for_index(arena: Arena) -> None:
    """The unit cannot write down what it holds: puts go to the other one. Then it is killed: all of it is there."""
    unit = _unit(arena)
    os.truncate(unit.log, 0)  # the limit holds for the log, too
    limits = resource.prlimit(unit.process.pid, resource.RLIMIT_FSIZE, (_INDEX_BYTES, resource.RLIM_INFINITY))
    wait_until(lambda: "takes no more" in unit.log.read_text(), "the unit says so", DEADLINE_S)
    wait_for_rows(arena.load, 100, "puts go to the other unit")
    resource.prlimit(unit.process.pid, resource.RLIMIT_FSIZE, limits)
    wait_for_rows(arena.load, 100, "rows go through")
    _killed(_unit)(arena)


def _clock_jumps(arena: Arena) -> None:
    """The wall clock of both kinds of servers is a day ahead, then a day behind."""
    clock = arena.stack.folder / "clock"
    clock.write_text("+0")
    faked = {
        "LD_PRELOAD": str(faketime()), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_NO_CACHE": "1",
    }  # fmt: skip
    for environ in (faked, dict.fromkeys(faked)):
        for process in (_controller(arena), _unit(arena)):
            process.kill()
            process.environ = {name: value for name, value in environ.items() if value is not None}
            _start_again(arena, process)
        for jump in ("+1d", "-1d", "+0") if environ is faked else ():
            before = _wall_clock(arena)
            clock.write_text(jump)
            wait_until(lambda before=before: abs(_wall_clock(arena) - before) > 3600, "the clock jumps")
            wait_for_rows(arena.load, 60, f"rows go through with the clock at {jump}")


def _wall_clock(arena: Arena) -> float:
    """As the controller sees it: seconds since 1970."""
    return float(json.loads(_controller(arena).http("/api/dataflow")[1])["time"])


def faketime() -> Path | None:
    """libfaketime, if it is installed."""
    return next(iter(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), None)


def _disk_full(arena: Arena) -> None:
    """The controller cannot write its journal any more, ends, and is started when there is room again."""
    controller = arena.stack.controller
    files = (arena.stack.folder / "journal").iterdir()
    size = max(path.stat().st_size for path in files)
    resource.prlimit(controller.process.pid, resource.RLIMIT_FSIZE, (size, size))
    wait_until(lambda: controller.process.poll() is not None, "the controller ends", DEADLINE_S)
    assert controller.process.returncode != 0
    controller._close_pipes()
    arena.stack.restart_controller()


def _no_memory(arena: Arena) -> None:
    """The controller gets no more memory, ends, and is started where there is some."""
    controller = arena.stack.controller
    (size,) = re.findall(r"VmData:\s+(\d+) kB", Path(f"/proc/{controller.process.pid}/status").read_text())
    limit = (int(size) << 10) + (4 << 20)
    resource.prlimit(controller.process.pid, resource.RLIMIT_DATA, (limit, limit))
    client = tq.TransferQueueClient("filler", arena.link.address)
    ended = threading.Event()
    filling = threading.Thread(target=_fill_until, args=(client, ended))
    filling.start()
    try:
        wait_until(lambda: controller.process.poll() is not None, "the controller ends", DEADLINE_S)
    finally:
        ended.set()
    assert controller.process.returncode == 1
    assert "out of memory" in controller.log.read_text()
    controller._close_pipes()
    arena.stack.restart_controller()
    filling.join(DEADLINE_S)
    client.clear_partition("filler")
    client.close()


def _fill_until(client: tq.TransferQueueClient, over: threading.Event) -> None:
    filler = TensorDict({"x": torch.zeros(4096, 1, dtype=torch.uint8)}, batch_size=[4096])
    while not over.is_set():
        client.put(filler, partition_id="filler")


def _memory_full(arena: Arena) -> None:
    client = tq.TransferQueueClient("filler", arena.link.address)
    filler = TensorDict({"x": torch.zeros(1, 1 << 20, dtype=torch.uint8)}, batch_size=[1])
    try:
        while True:
            client.put(filler, partition_id="filler")
    except CapacityError:
        client.clear_partition("filler")
    finally:
        client.close()


def _no_descriptors(part: Callable[[Arena], Process]) -> Callable[[Arena], None]:
    """Nobody new is let in; those who are in go on."""

    def inflict(arena: Arena) -> None:
        process = part(arena).process
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        used = max(int(path.name) for path in Path(f"/proc/{process.pid}/fd").iterdir()) + 1
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (used, limits[1]))
        made: list[tq.TransferQueueClient] = []
        attempt = threading.Thread(target=lambda: made.append(tq.TransferQueueClient("late", arena.link.address)))
        attempt.start()
        wait_for_rows(arena.load, 40, "those who are in go on")
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        attempt.join(DEADLINE_S)
        assert len(made) == 1
        made[0].close()

    return inflict


CELLS = [
    Cell("controller", "kill -9", _killed(_controller)),
    Cell("controller", "restart", _restarted(_controller)),
    Cell("controller", "stop and continue", _stopped(_controller)),
    Cell("controller", "full disk", _disk_full),
    Cell("controller", "full memory", _no_memory),
    Cell("controller", "no descriptors", _no_descriptors(_controller)),
    Cell("storage unit", "kill -9", _killed(_unit)),
    Cell("storage unit", "restart", _restarted(_unit)),
    Cell("storage unit", "stop and continue", _stopped(_unit)),
    Cell("storage unit", "full disk", _no_room_for_index),
    Cell("storage unit", "full memory", _memory_full),
    Cell("storage unit", "no descriptors", _no_descriptors(_unit)),
    Cell("all servers", "kill -9", _everything_killed),
    *([Cell("controller, storage unit", "clock jumps", _clock_jumps)] if faketime() else []),
    Cell("consumer", "kill -9", _consumer_killed, lease_s=60.0),
    Cell("consumer", "stop and continue", _consumer_stopped, lease_s=60.0),
    Cell("consumer", "slow", _nothing, pause_s=0.05),
    Cell("clients' network", "delay", _delayed(_link)),
    Cell("clients' network", "partition", _partitioned(_link)),
    Cell("clients' network", "half-open", _half_open(_link)),
    Cell("clients' network", "repeated bytes", _spoilt(_link, 1, repeat=0.3)),
    Cell("clients' network", "packet loss", _spoilt(_link, 10, loss=0.1)),
    Cell("clients' network", "resets", _spoilt(_link, 5, reset=0.03)),
    Cell("clients' network", "duplicate messages", _spoilt(_link, 60, duplicate=0.3), together=True),
    Cell("clients' network", "reordered messages", _spoilt(_link, 60, reorder=0.3), together=True),
    Cell("units' network", "delay", _delayed(_unit_link)),
    Cell("units' network", "partition", _partitioned(_unit_link)),
    Cell("units' network", "half-open", _half_open(_unit_link)),
    Cell("units' network", "packet loss", _spoilt(_unit_link, 5, loss=0.2)),
    Cell("units' network", "resets", _spoilt(_unit_link, 3, reset=0.2)),
    Cell("units' network", "duplicate and reordered messages", _disordered_notices),
]
