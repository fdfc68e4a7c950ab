"""The boundary at which expected faults become a line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from transfer_queue.errors import ConfigError, TransferQueueError
from transfer_queue.launch.supervise import Interrupted, interruptible

__all__ = ["console", "faults"]

console = Console(stderr=True, highlight=False, soft_wrap=True)
"""For words to people; results go to standard output."""


@contextmanager
def faults() -> Iterator[None]:
    """Exit codes: 2 for wrong settings and arguments, 1 for what did not work, 128 + n after signal n."""
    try:
        interruptible()
        yield
    except TransferQueueError as error:
        for line in str(error).splitlines():
            console.print("[red]error:[/]", line.replace("[", "\\["))
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except Interrupted as signalled:
        raise typer.Exit(signalled.exit_code) from None
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
