"""The commands: arguments in, exit code out. Expected faults are one line each, without a traceback.

What is slow to import is imported by the command that needs it, so that ``tq up`` starts at once.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Annotated, Optional

import msgspec
import typer

from transfer_queue.cli import checkpoint, data, diagnosis, storage
from transfer_queue.cli.faults import console, faults
from transfer_queue.cli.output import Output, OutputOption, show
from transfer_queue.cli.state import RunningQueue, read_running, stop_running
from transfer_queue.cli.up import bring_up, bring_up_detached
from transfer_queue.config import resource
from transfer_queue.errors import ConfigError, TransferQueueError
from transfer_queue.launch.plan import plan_local, with_backend

__all__ = ["app"]

app = typer.Typer(
    name="tq",
    help="TransferQueue: the data plane between rollout workers and trainers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

File = Annotated[Path, typer.Option("--file", "-f", help="YAML of a TransferQueue resource.")]
# typer reads annotations at run time: Optional, as `X | None` needs a newer typer on Python 3.10
BackendName = Annotated[Optional[str], typer.Option("--backend", help="simple or mooncake, instead of the file's.")]  # noqa: UP045
Command = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(help="A command to run with TQ_CONFIG_FILE set; the queue ends with it.", show_default=False),
]


@app.command()
def up(
    file: File,
    backend: BackendName = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the queue serves.")] = False,
    background: Annotated[bool, typer.Option(hidden=True)] = False,
    command: Command = None,
) -> None:
    """Run a queue on this machine: until Ctrl-C, in the background, or as long as COMMAND runs."""
    with faults():
        wanted = resource.load(file)
        plan = plan_local(with_backend(wanted, backend) if backend else wanted)
        if detach and command:
            raise ConfigError("--detach and a command exclude each other: the queue of a command ends with it")
        if detach:
            code = bring_up_detached(file, backend, console)
        else:
            code = bring_up(plan, command or [], console, background=background)
    raise typer.Exit(code)


@app.command()
def down(name: Annotated[Optional[str], typer.Argument(help="By default the only one that runs.")] = None) -> None:  # noqa: UP045
    """Take a queue of this machine down."""
    with faults():
        running = read_running()
        if not running and name is None:
            console.print("no queue is running here")
            return
        queue = _pick(running, name)
        stop_running(queue)
        console.print(f"{queue.name} is down")


def _pick(running: list[RunningQueue], name: str | None) -> RunningQueue:
    names = ", ".join(queue.name for queue in running) or "none"
    if name is None and len(running) > 1:
        raise ConfigError(f"several queues are running, name one of them: {names}")
    for queue in running:
        if name in (None, queue.name):
            return queue
    raise TransferQueueError(f"queue {name} is not running here; running: {names}")


@app.command()
def status(output: OutputOption = Output.table) -> None:
    """Show the queues of this machine."""
    running = read_running()
    if output is not Output.table:
        show([msgspec.to_builtins(queue) for queue in running], output, list)
        return
    if not running:
        console.print("no queue is running here")
        return
    for queue in running:
        typer.echo(f"{queue.name}: {queue.backend} backend, kept by pid {queue.pid}")
        for server in queue.servers:
            typer.echo(f"  {server.name:<16} pid {server.pid:<8} {server.address}".rstrip())
        typer.echo(f"  export TQ_CONFIG_FILE={queue.attach_file}")


@app.command()
def version() -> None:
    """Show the version."""
    with faults():
        try:
            typer.echo(importlib.metadata.version("TransferQueue"))
        except importlib.metadata.PackageNotFoundError:
            raise TransferQueueError(
                "TransferQueue runs from a folder without being installed: pip install ."
            ) from None


for command in (
    diagnosis.top,
    storage.drain,
    data.ls,
    data.get,
    data.put,
    data.clear,
    data.tail,
    diagnosis.trace,
    diagnosis.doctor,
    diagnosis.plan,
    diagnosis.bench,
):
    app.command()(command)
app.add_typer(checkpoint.app, name="checkpoint")
