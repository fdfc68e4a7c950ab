"""Seeing what goes on and what is wrong: ``top``, ``doctor``, ``plan``."""

from __future__ import annotations

from pathlib import Path
from time import sleep
from typing import Annotated, Optional

import typer

from transfer_queue.cli.connection import ControllerConnection, ControllerOption, QueueOption, find_queue, partitions
from transfer_queue.cli.faults import console, faults, say
from transfer_queue.cli.output import Output, OutputOption, show
from transfer_queue.errors import ConfigError, ConnectionLostError
from transfer_queue.launch.supervise import Interrupted

__all__ = ["bench", "doctor", "plan", "top", "trace", "why"]


def top(
    once: Annotated[bool, typer.Option("--once", help="Show it once and end, for scripts.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between looks.")] = 1.0,
    queue: QueueOption = None,
    controller: ControllerOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Watch partitions, fields, tasks, waiting requests and storage; q quits."""
    with faults():
        from transfer_queue.cli.top import watch

        with ControllerConnection(find_queue(queue, controller)) as link:
            watch(link, output, once=once, interval_s=interval)


def why(
    partition: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="Only requests for this partition.", show_default=False, autocompletion=partitions),
    ] = None,
    queue: QueueOption = None,
    controller: ControllerOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Say what requests wait for: which fields are missing on how many rows, and which client wrote them last."""
    with faults():
        from transfer_queue.runtime.why import explain

        with ControllerConnection(find_queue(queue, controller)) as link:
            sentences = explain(link.look(), partition)
        show(sentences, output, lambda: sentences)


def doctor(
    file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--file", "-f", help="A TransferQueue resource that is to run on this machine."),
    ] = None,
    root: Annotated[Path, typer.Option("--root", help="Folder that holds sys, proc and dev; for recordings.")] = Path(
        "/"
    ),
    shared_memory: Annotated[Path, typer.Option("--shared-memory", help="Where arenas are made.")] = Path("/dev/shm"),
    queue: QueueOption = None,
    controller: ControllerOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Look for what is wrong on this machine or in this pod: each line ok, warn or fail, with the fix.

    Exit code 1 if anything fails. Nothing is changed, and no queue needs to run.
    """
    with faults():
        from transfer_queue.cli.doctor import Subject, draw_findings, examine

        if queue is not None or controller is not None:
            find_queue(queue, controller)  # which refuses a name that does not exist
        findings = examine(Subject(file, root, shared_memory, queue, controller))
        show([finding._asdict() for finding in findings], output, lambda: draw_findings(findings))
    raise typer.Exit(int(any(finding.state == "fail" for finding in findings)))


def trace(
    file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(help="Where to write the trace, JSON.", show_default=False),
    ] = None,
    perfetto: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--perfetto", help="The same as FILE.", show_default=False),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", "-s", min=0, help="How long; Ctrl-C ends it earlier.")] = 10.0,
    partition: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--partition", "-p", help="Only this one, for example that of one training step."),
    ] = None,
    queue: QueueOption = None,
    controller: ControllerOption = None,
) -> None:
    """Record who puts and fetches what when, as a timeline for ui.perfetto.dev or chrome://tracing."""
    with faults():
        import json

        from transfer_queue.cli.trace import chrome_trace
        from transfer_queue.control.commands import ListPartitions
        from transfer_queue.control.puts import did_you_mean
        from transfer_queue.runtime.tracing import MOST_EVENTS
        from transfer_queue.wire.messages import Trace

        if file is None:
            file = perfetto
        elif perfetto is not None:
            raise ConfigError("name one file, with or without --perfetto")
        if file is None:
            raise ConfigError("name the file to write: tq trace step.json, or tq trace --perfetto step.json")
        config = find_queue(queue, controller)
        if not file.parent.is_dir():
            raise ConfigError(f"{file}: there is no folder {file.parent}")
        with ControllerConnection(config) as link:
            link.request(Trace(MOST_EVENTS))
            say(f"recording for {seconds:g} s; Ctrl-C ends it")
            try:
                for _ in range(max(1, round(seconds))):
                    sleep(seconds / max(1, round(seconds)))
                    link.look()  # a silent connection counts as dead
            except Interrupted:
                pass
            except ConnectionLostError as error:
                raise ConnectionLostError(f"the record is lost: {error}") from None
            record = link.request(Trace()).value
            names = link.request(ListPartitions("")).value
        found = chrome_trace(record, partition)
        file.write_text(json.dumps(found))
        slices = sum(event["ph"] == "X" for event in found["traceEvents"])
        say(f"{slices} puts, waits, gets and clears in {file}; open it in ui.perfetto.dev")
        if partition is not None and not slices and partition not in names:
            say(f"there is no partition {partition!r}{did_you_mean([partition], names)}")


def bench(
    backend: Annotated[str, typer.Option("--backend", help="all, or the name of one.")] = "all",
    size: Annotated[int, typer.Option("--size", min=1, max=65536, help="MB of a batch.")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="The best of as many counts.")] = 5,
    output: OutputOption = Output.table,
) -> None:
    """Measure storage backends on this machine: dense and mixed batches through a queue of each, in GB/s.

    Starts queues, masters and workers of its own on the loopback interface. Needs four times --size of shared memory.
    """
    with faults():
        from transfer_queue.cli.bench import chosen_backends, draw_report, measure_all

        report = measure_all(chosen_backends(backend), size, rounds, console.print)
        show(report.document(), output, lambda: draw_report(report))


def plan(
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs of the job, rollout and training together.")],
    seq: Annotated[str, typer.Option("--seq", help="Tokens of a sample, prompt and answer, such as 4096 or 32k.")],
    samples: Annotated[Optional[int], typer.Option("--samples", min=1, help="Samples a step; default 8 a GPU.")] = None,  # noqa: UP045
    bytes_per_token: Annotated[float, typer.Option("--bytes-per-token", help="Of all fields of a sample.")] = 28.0,
    steps: Annotated[int, typer.Option("--steps-in-flight", min=1, help="Steps whose samples exist at once.")] = 2,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1)] = 8,
    gbits: Annotated[float, typer.Option("--gbits", min=0.1, help="Network of a node, Gb/s.")] = 200.0,
    output: OutputOption = Output.table,
) -> None:
    """Work out how many storage units of what size a job needs, and how long a step's samples take to move."""
    with faults():
        from transfer_queue.cli.sizing import Job, draw_sizing, parse_tokens, size

        job = Job(
            gpus=gpus,
            tokens=parse_tokens(seq),
            samples=samples or 8 * gpus,
            bytes_per_token=bytes_per_token,
            steps_in_flight=steps,
            gpus_per_node=gpus_per_node,
            gbits=gbits,
        )
        sizing = size(job)
        show(sizing.document(), output, lambda: draw_sizing(job, sizing))
