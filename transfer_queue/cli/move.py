"""Partitions of several controllers: ``move``."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.markup import escape

from transfer_queue._printable import printable
from transfer_queue.cli.connection import ControllerOption, QueueOption, find_queue, partitions
from transfer_queue.cli.faults import console, faults, say
from transfer_queue.cli.output import human_bytes

__all__ = ["move"]


def move(
    partition: Annotated[
        str, typer.Argument(help="Name of a partition.", autocompletion=partitions, show_default=False)
    ],
    shard: Annotated[int, typer.Argument(help="Number of a controller; they count from 0.", min=0, show_default=False)],
    timeout: Annotated[float, typer.Option(help="Give up after so many seconds.", min=1)] = 60.0,
    queue: QueueOption = None,
    controller: ControllerOption = None,
) -> None:
    """Move a partition to another controller of a queue that has several. The partition stays in use."""
    with faults():
        from transfer_queue.client.moving import move_partition

        found = find_queue(queue, controller)
        name = printable(partition)
        with console.status(f"moving {escape(name)}"):
            done = asyncio.run(
                move_partition(found.controller.addresses, partition, shard, security=found.security, timeout_s=timeout)
            )
        if done.source == shard:
            say(f"{name} is on controller {shard} already")
            return
        say(
            f"{name} moved from controller {done.source} to {shard}: {done.rows} rows, {done.blocks} blocks, "
            f"{human_bytes(done.nbytes)}; changes waited for {done.held_s:.2f} s"
        )
