"""``tq up``: a local stack, kept in the foreground, in the background, or for the time of a command."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from transfer_queue._printable import printable
from transfer_queue.cli.state import RunningQueue, ServerState, claim, write_running
from transfer_queue.config import resource
from transfer_queue.config.document import read_yaml, standard_input
from transfer_queue.config.processes import SamplerChoice
from transfer_queue.config.resource import TransferQueue
from transfer_queue.errors import ConfigError, StartError, TransferQueueError
from transfer_queue.launch.local import LocalStack
from transfer_queue.launch.plan import LocalPlan
from transfer_queue.launch.supervise import keep, run_command
from transfer_queue.runtime.sampler import load_sampler

__all__ = ["bring_up", "bring_up_detached", "load_resource"]

_READY = "export TQ_CONFIG_FILE="
"""The line that says that the queue serves, made to be pasted into a shell."""
_LOG = "tq.log"


def load_resource(file: Path) -> TransferQueue:
    """The resource of ``file``, with a sampler that can be made on this machine. Raises ConfigError."""
    wanted = resource.load(file)
    sampler = wanted.spec.controller.sampler
    try:
        load_sampler(SamplerChoice(name=sampler.name, args=sampler.args))
    except ConfigError as error:
        part = "args" if str(error).startswith("sampler.args") else "name"
        line = read_yaml(file, "TransferQueue").line(("spec", "controller", "sampler", part))
        raise ConfigError(f"{file}: spec.controller.{error}{line}") from None
    return wanted


def bring_up(plan: LocalPlan, command: Sequence[str], console: Console, *, background: bool = False) -> int:
    """Start the stack, keep it until ``command`` ends or a signal arrives, stop it; returns the exit code.

    ``background``: once it serves, this process lets go of its standard error and logs to the queue's folder.
    Raises StartError, ConfigError.
    """
    if command and shutil.which(command[0]) is None:  # said now, not once everything has started
        raise ConfigError(f"cannot run {command[0]}: not found, or not executable")
    with claim(plan.name, [*plan.files, _LOG]) as folder:
        try:
            return _bring_up(LocalStack(plan, folder), command, console, background=background)
        except OSError as error:
            if isinstance(error, (TransferQueueError, BrokenPipeError)):
                raise
            raise StartError(
                f"{error.filename or folder}: {error.strerror}; make room, or set XDG_STATE_HOME to another folder"
            ) from None


def _bring_up(stack: LocalStack, command: Sequence[str], console: Console, *, background: bool) -> int:
    folder = stack.directory
    attach: Path | None = None

    def report(what: str, after: float) -> None:
        line = f"{after:6.1f} s  {printable(what)}"
        if attach is None:
            console.print(line, markup=False)
            return
        with suppress(OSError):  # a full disk, or a terminal that is gone, must not end a queue that serves
            console.print(line, markup=False)
        with suppress(OSError):
            write_running(folder, _describe(stack, attach))  # a restarted server has another pid

    console.print(f"starting queue [bold]{stack.plan.name}[/] with {_parts(stack.plan)}")
    with stack.start(report):
        try:
            attach = stack.write_attach_config()
            write_running(folder, _describe(stack, attach))
            if stack.page:
                console.print(f"page: {stack.page}")
            if command:
                code = run_command(stack, command, {**os.environ, "TQ_CONFIG_FILE": str(attach)})
                stack.note("down", f"its command {command[0]} ended with code {code}")
                return code

            def announce() -> None:
                if not background:
                    console.print("Ctrl-C stops it; programs that use it need:")
                console.print(f"{_READY}{attach}")
                if background:
                    _detach(folder / _LOG)

            keep(stack, announce)
            stack.note("down", "it was taken down")
            return 0
        except (StartError, OSError) as error:
            stack.note("failed", str(error))
            raise


def _parts(plan: LocalPlan) -> str:
    units = f"{len(plan.units)} storage unit{'s' if len(plan.units) != 1 else ''}"
    controllers = "a controller" if plan.shards == 1 else f"{plan.shards} controllers"
    return f"{controllers}, {units}" + (" and a mooncake_master" if plan.master else "")


def _describe(stack: LocalStack, attach: Path) -> RunningQueue:
    servers = [
        ServerState(process.name, process.pid, process.address.get("address") or "") for process in stack.processes
    ]
    return RunningQueue(
        name=stack.plan.name,
        pid=os.getpid(),
        backend=stack.plan.controller.backend.kind,
        controller=stack.controller_address,
        attach_file=str(attach),
        servers=servers,
        page=stack.page,
        restarts=stack.restarts,
    )


def _detach(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def bring_up_detached(file: Path, backend: str | None, console: Console) -> int:
    """Run ``tq up`` as a process of its own and return once it serves, or with its exit code if it does not."""
    arguments = [sys.executable, "-m", "transfer_queue.cli", "up", "--background", "--file", str(file)]
    if backend:
        arguments += ["--backend", backend]
    keeper = subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    assert keeper.stdin is not None
    assert keeper.stderr is not None
    with contextlib.suppress(BrokenPipeError), keeper.stdin as given:  # a keeper that ended says why below
        given.write(standard_input().encode() if str(file) == "-" else b"")
    for line in keeper.stderr:
        console.out(line.decode(errors="replace").rstrip("\n"))
        if line.startswith(_READY.encode()):
            return 0
    return keeper.wait()
