"""A whole queue as files and back: ``checkpoint save``, ``load``, ``show``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from transfer_queue.cli.connection import ControllerOption, QueueOption, find_queue
from transfer_queue.cli.data import parse_json
from transfer_queue.cli.faults import console, faults, say
from transfer_queue.cli.output import Output, OutputOption, human_bytes, make_table, show, unmarked
from transfer_queue.cli.usage import HelpfulCommand
from transfer_queue.errors import ConfigError

if TYPE_CHECKING:
    from transfer_queue.checkpoint import files
    from transfer_queue.checkpoint.directory import CheckpointDirectory
    from transfer_queue.client.client import Client

__all__ = ["app"]

app = typer.Typer(
    help="Save a whole queue to files, load it into another queue, or show a saved queue.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Place = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="Directory of the checkpoint, or a URL: s3://bucket/prefix.", show_default=False
    ),
]


@app.command(
    cls=HelpfulCommand,
    epilog="\b\nExamples:\n  tq checkpoint save /ckpt/step_1200\n"
    "  tq checkpoint save s3://bucket/run7 --every 60 --keep 5",
)
def save(
    path: Place,
    data: Annotated[bool, typer.Option("--data/--no-data", help="The rows' data too; simple always does.")] = True,
    metadata: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--metadata", help="A JSON object of your own, kept with it."),
    ] = None,
    every: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--every",
            min=1,
            metavar="SECONDS",
            help="Save at intervals until a signal stops it, each time to a new folder below PATH, named by its time.",
        ),
    ] = None,
    keep: Annotated[int, typer.Option("--keep", min=1, help="With --every: how many of this queue's newest stay.")] = 3,
    queue: QueueOption = None,
    controller: ControllerOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Write the queue as it is at one moment while everybody goes on. An earlier checkpoint at PATH is replaced."""
    with faults():
        about = _parse_metadata(metadata)
        from transfer_queue.checkpoint.directory import open_directory
        from transfer_queue.checkpoint.save import save_queue

        def save_to(client: Client, directory: CheckpointDirectory, former: CheckpointDirectory | None = None) -> None:
            with _progress(f"saving to {directory}") as progress:
                manifest = save_queue(
                    client, directory, include_storage=data, metadata=about, progress=progress, former=former
                )
            place = str(directory)
            show(_summary(place, manifest), output, lambda: [_line("saved", place, manifest)])

        if every is not None:
            _save_at_intervals(path, queue, controller, every, keep, save_to)
            return
        with _client(queue, controller) as client:
            save_to(client, open_directory(path))


def _save_at_intervals(
    path: str,
    queue: str | None,
    controller: str | None,
    every: float,
    keep: int,
    save_to: Callable[[Client, CheckpointDirectory, CheckpointDirectory | None], None],
) -> None:
    """Now, and at the multiples of ``every`` seconds until a signal."""
    from transfer_queue.checkpoint.scheduled import save_at, save_next
    from transfer_queue.checkpoint.series import Series

    series = Series(path, find_queue(queue, controller).identity)

    def save() -> None:
        with _client(queue, controller) as client:
            if not save_next(client, series, partial(save_to, client)):
                say("the queue has no rows; the checkpoints that there are stay")

    def times() -> Iterator[None]:
        while True:
            yield
            time.sleep(every - time.time() % every)

    save_at(times(), series, keep, save, say)


@app.command(cls=HelpfulCommand, epilog="\b\nExamples:\n  tq checkpoint load /ckpt/step_1200")
def load(
    path: Place,
    replace: Annotated[bool, typer.Option("--replace", help="Replace all rows of the queue.")] = False,
    queue: QueueOption = None,
    controller: ControllerOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Load a checkpoint, all or nothing, into a queue without rows."""
    with (
        faults(),
        _client(queue, controller) as client,
        _progress(f"loading {path}") as progress,
    ):
        from transfer_queue.checkpoint.load import load_queue
        from transfer_queue.checkpoint.series import newest

        directory = newest(path)
        manifest = load_queue(client, directory, replace=replace, progress=progress)
        path = str(directory)
        show(_summary(path, manifest), output, lambda: [_line("loaded", path, manifest)])


@app.command("show", cls=HelpfulCommand, epilog="\b\nExamples:\n  tq checkpoint show /ckpt/step_1200 --verify")
def show_(
    path: Place,
    verify: Annotated[bool, typer.Option("--verify", help="Read every block and compare its checksum.")] = False,
    output: OutputOption = Output.table,
) -> None:
    """Show what a checkpoint holds. Needs no queue; files that are missing or damaged are named."""
    with faults():
        from transfer_queue.checkpoint import load
        from transfer_queue.checkpoint.directory import MANIFEST
        from transfer_queue.checkpoint.series import newest

        directory = newest(path)
        path = str(directory)
        with load.reading(directory) as manifest:
            captured = load.captured_state(directory, manifest)
            saved = datetime.fromtimestamp(directory.modified(MANIFEST), timezone.utc)
            if verify:
                with _progress(f"reading {path}") as progress:
                    load.verify(directory, manifest, progress=progress)
        partitions = [_partition(state) for state in captured["state"]["partitions"]]
        document = {
            **_summary(path, manifest),
            "format": manifest.format,
            "saved": saved.isoformat(timespec="seconds"),
            "verified": verify,
            "contents": partitions,
        }
        columns = ["PARTITION", "ROWS", "KEYS", "BYTES", "FIELDS", "TASKS"]
        rows = [
            [item["name"], item["rows"], item["keys"], human_bytes(item["bytes"]), *map(_join, _lists(item))]
            for item in partitions
        ]
        title = _line("holds" if not verify else "is sound and holds", path, manifest)
        about = [f"metadata: {json.dumps(manifest.user_metadata)}"] if manifest.user_metadata else []
        show(document, output, lambda: [title, f"saved {document['saved']}", *about, make_table(columns, rows)])


@contextmanager
def _client(queue: str | None, controller: str | None) -> Iterator[Client]:
    config = find_queue(queue, controller)
    from transfer_queue.client.client import Client

    client = Client("tq", config)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def _progress(what: str) -> Iterator[files.Progress]:
    """A bar on standard error while it is a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(unmarked(what), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _parse_metadata(text: str | None) -> dict[str, Any]:
    found = {} if text is None else parse_json("--metadata", text)
    if not isinstance(found, dict):
        raise ConfigError(f'--metadata: expected a JSON object such as {{"step": 1200}}, got {text}')
    return found


def _summary(path: str, manifest: files.Manifest) -> dict[str, Any]:
    return {
        "path": str(path),
        "partitions": manifest.partitions,
        "rows": manifest.rows,
        "bytes": manifest.nbytes,
        "written": manifest.written,
        "storage_saved": manifest.storage_saved,
        "metadata": manifest.user_metadata,
    }


def _line(verb: str, path: str, manifest: files.Manifest) -> str:
    data = "" if manifest.storage_saved else ", without data"
    new = f" ({human_bytes(manifest.written)} of them new)" if manifest.borrowed else ""
    found = f"{manifest.rows} rows in {manifest.partitions} partitions, {human_bytes(manifest.nbytes)}{new}{data}"
    return f"{path} {verb} {found}" if verb.endswith("holds") else f"{verb} {found}: {path}"


def _partition(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": state["name"],
        "rows": state["rows"],
        "keys": len(state["keys"] or ()),
        "bytes": state["nbytes"],
        "fields": sorted(state["fields"]),
        "tasks": [task[0] for task in state["tasks"]],
    }


def _lists(item: dict[str, Any]) -> tuple[list[str], list[str]]:
    return item["fields"], item["tasks"]


def _join(names: list[str]) -> str:
    return ", ".join(names)
