"""The commands: arguments in, exit code out. Expected faults are one line each, without a traceback.

What is slow to import is imported by the command that needs it, so that ``tq up`` starts at once.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Optional

import msgspec
import typer

from transfer_queue._printable import printable
from transfer_queue.cli import checkpoint, data, diagnosis, move, storage
from transfer_queue.cli.connection import QueueOption, running_queues
from transfer_queue.cli.faults import console, faults, say
from transfer_queue.cli.output import Output, OutputOption, human_bytes, show
from transfer_queue.cli.state import RunningQueue, read_ended, read_running, stop_running
from transfer_queue.cli.up import bring_up, bring_up_detached, load_resource
from transfer_queue.cli.usage import HelpfulCommand
from transfer_queue.config import resource
from transfer_queue.config.variables import check_values, misspelt
from transfer_queue.errors import ConfigError, TransferQueueError
from transfer_queue.launch.plan import plan_local, with_backend
from transfer_queue.launch.ports import PortClaims, with_free_ports

__all__ = ["app"]

app = typer.Typer(
    name="tq",
    help="TransferQueue: the data plane between rollout workers and trainers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

File = Annotated[Path, typer.Option("--file", "-f", help="YAML of a TransferQueue resource; - reads standard input.")]
# typer reads annotations at run time: Optional, as `X | None` needs a newer typer on Python 3.10
BackendName = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--backend",
        help="simple or mooncake, instead of the file's.",
        autocompletion=lambda incomplete: [name for name in ("simple", "mooncake") if name.startswith(incomplete)],
    ),
]
Command = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(help="A command to run with TQ_CONFIG_FILE set; the queue ends with it.", show_default=False),
]


def up(
    file: File,
    backend: BackendName = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the queue serves.")] = False,
    background: Annotated[bool, typer.Option(hidden=True)] = False,
    command: Command = None,
) -> None:
    """Run a queue on this machine: until Ctrl-C, in the background, or as long as COMMAND runs."""
    with faults():
        wanted = load_resource(file)
        if backend:
            wanted = with_backend(wanted, backend)
        if detach and command:
            raise ConfigError("--detach and a command exclude each other: the queue of a command ends with it")
        with PortClaims() as claims:
            try:
                plan = plan_local(with_free_ports(wanted, None if detach else claims))
            except ConfigError as error:
                raise ConfigError(f"{file}: {error}") from None
            if detach:
                code = bring_up_detached(file, backend, console)
            else:
                code = bring_up(plan, command or [], console, background=background)
    raise typer.Exit(code)


def down(
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="QUEUE",
            help="Name of a queue; by default the only running queue.",
            autocompletion=running_queues,
            show_default=False,
        ),
    ] = None,
    queue_name: QueueOption = None,
    file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--file", "-f", help="The file that the queue was started with, in place of its name."),
    ] = None,
) -> None:
    """Take a queue of this machine down."""
    with faults():
        if file is not None:
            queue_name = queue_name or resource.load(file).metadata.name
        if None not in (name, queue_name) and name != queue_name:
            raise ConfigError(f"two queues are named, {name} and {queue_name}; take down one at a time")
        name = name or queue_name
        running = read_running()
        if not running and name is None:
            console.print("no queue is running here")
            return
        queue = _pick(running, name)
        stop_running(queue)
        say(f"{queue.name} is down")


def _pick(running: list[RunningQueue], name: str | None) -> RunningQueue:
    names = ", ".join(queue.name for queue in running) or "none"
    if name is None and len(running) > 1:
        raise ConfigError(f"several queues are running, name one of them: {names}")
    for queue in running:
        if name in (None, queue.name):
            return queue
    raise TransferQueueError(f"queue {name} is not running here; running: {names}")


def status(queue_name: QueueOption = None, output: OutputOption = Output.table) -> None:
    """Show the queues of this machine."""
    running = read_running()
    if queue_name is not None:
        with faults():
            running = [_pick(running, queue_name)]
    if output is not Output.table:
        show([msgspec.to_builtins(queue) for queue in running], output, list)
        return
    if not running:
        console.print("no queue is running here")
    for queue in running:
        _echo(f"{queue.name}: {queue.backend} backend, kept by pid {queue.pid}")
        for server in queue.servers:
            _echo(f"  {server.name:<16} pid {server.pid:<8} {server.address}".rstrip())
        if queue.page:
            _echo(f"  page: {queue.page}")
        if queue.checkpoint and (last := queue.checkpoint.last):
            saved = (
                f"{last.rows} rows, {human_bytes(last.bytes)} at {last.time}: {last.url}" if last.url else "none yet"
            )
            _echo(f"  checkpoint: {saved}" + (f" ({last.error})" if last.error else ""))
        _echo(f"  export TQ_CONFIG_FILE={queue.attach_file}")
    for trouble in read_ended():
        when = datetime.fromtimestamp(trouble.at).strftime("%Y-%m-%d %H:%M:%S")
        say(f"{trouble.queue} ended at {when}: {trouble.reason}")


def _echo(text: str) -> None:
    typer.echo(printable(text))


def version() -> None:
    """Show the version."""
    with faults():
        try:
            typer.echo(importlib.metadata.version("TransferQueue"))
        except importlib.metadata.PackageNotFoundError:
            raise TransferQueueError(
                "TransferQueue runs from a folder without being installed: pip install ."
            ) from None


def _version_option(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def tq(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version_option, help="Show the version and exit.")
    ] = False,
) -> None:
    """TransferQueue: the data plane between rollout workers and trainers."""
    if context.invoked_subcommand != "doctor":  # which reports them with the fix
        for text in misspelt():
            say(f"warning: {text}")
        with faults():
            check_values()


_COMMANDS: dict[Callable[..., None], Sequence[str]] = {
    up: ("tq up -f queue.yaml -- python train.py", "tq up -f queue.yaml --detach"),
    down: ("tq down", "tq down --queue demo"),
    status: ("tq status", "tq status -o json"),
    diagnosis.top: ("tq top", "tq top --once"),
    storage.drain: ("tq drain storage-0", "tq drain storage-0 --cancel"),
    move.move: ("tq move train_0 2",),
    data.ls: ("tq ls", "tq ls train_0"),
    data.get: ("tq get train_0 a b", "tq get train_0 a -F reward -o json"),
    data.put: ("tq put train_0 a reward=1.0 text='\"hello\"'", "tq put train_0 a --tag '{\"score\": 1}'"),
    data.clear: ("tq clear train_0 a b", "tq clear train_0 --all --yes"),
    data.reset: ("tq reset train_0 --task evaluate", "tq reset train_0 --idle 3600"),
    data.tail: ("tq tail train_0", "tq tail train_0 --count 8 --timeout 60"),
    diagnosis.trace: ("tq trace step.json --seconds 30",),
    diagnosis.why: ("tq why", "tq why train_0"),
    diagnosis.doctor: ("tq doctor", "tq doctor -f queue.yaml"),
    diagnosis.plan: ("tq plan --gpus 64 --seq 8k",),
    diagnosis.bench: ("tq bench --backend simple",),
    version: ("tq version",),
}
for command, examples in _COMMANDS.items():
    app.command(
        cls=HelpfulCommand,
        epilog="\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples),
        # Options after the command of tq up belong to it, even without --.
        context_settings={"allow_interspersed_args": command is not up},
    )(command)
app.add_typer(checkpoint.app, name="checkpoint")
