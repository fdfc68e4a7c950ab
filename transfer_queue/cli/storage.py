"""Storage units: ``drain``."""

from __future__ import annotations

import asyncio
import math
from typing import Annotated

import typer

from transfer_queue.cli.connection import ControllerOption, QueueOption, find_queue
from transfer_queue.cli.faults import console, faults, say
from transfer_queue.cli.output import human_bytes, unmarked

__all__ = ["drain"]


def _draining(unit: str) -> str:
    return unmarked(f"draining {unit}")


def drain(
    unit: Annotated[str, typer.Argument(help="Name of a storage unit; tq top shows them.", show_default=False)],
    timeout: Annotated[float, typer.Option(help="Give up after so many seconds; 0: never.", min=0)] = 0.0,
    cancel: Annotated[bool, typer.Option("--cancel", help="Let the unit take new blocks again.")] = False,
    queue: QueueOption = None,
    controller: ControllerOption = None,
) -> None:
    """Move all rows of a storage unit to other units, so that its process can stop. The queue stays in use."""
    with faults():
        from transfer_queue.client.draining import drain_unit, undrain_unit

        found = find_queue(queue, controller)
        addresses = found.controller.addresses
        if cancel:
            asyncio.run(undrain_unit(addresses, unit, security=found.security))
            say(f"{unit} accepts new blocks again")
            return
        with console.status(_draining(unit)) as status:
            done = asyncio.run(
                drain_unit(
                    addresses,
                    unit,
                    security=found.security,
                    timeout_s=timeout or math.inf,
                    retire=True,
                    progress=lambda done: status.update(f"{_draining(unit)}: {human_bytes(done.nbytes)} moved"),
                )
            )
        say(
            f"{unit} is empty: {done.blocks} blocks, {human_bytes(done.nbytes)} were moved. It accepts no new "
            f"blocks until it restarts, or until tq drain {unit} --cancel"
        )
