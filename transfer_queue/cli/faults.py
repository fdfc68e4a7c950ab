"""The boundary at which expected faults become a line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from transfer_queue._printable import printable
from transfer_queue.cli.usage import UsageError
from transfer_queue.errors import ConfigError, InvalidInputError, InvalidTypeError, TransferQueueError
from transfer_queue.launch.supervise import Interrupted, interruptible

__all__ = ["console", "faults", "run", "say"]

_WRONG_ARGUMENT = (ConfigError, InvalidInputError, InvalidTypeError)
console = Console(stderr=True, highlight=False, soft_wrap=True)
"""Console for messages; results go to standard output."""


def run(app: typer.Typer, arguments: list[str] | None = None, **options: Any) -> int:
    """Run the command that ``arguments`` name (default: those of the process).

    Returns:
        The exit code: 2 for a usage error, which is reported in one line that names the help.
    """
    try:
        code = app(arguments, standalone_mode=False, **options)
    except UsageError as error:
        message = error.format_message()
        if "\n" in message:  # a group without a command: the message is its help
            typer.echo(message, err=True)
        else:
            path = error.ctx.command_path if error.ctx else app.info.name
            meant = getattr(error, "meant", "")
            _print_error(f"{message.rstrip('.')}{f'; did you mean {meant}?' if meant else ';'} see: {path} --help")
        return 2
    except typer.Abort:
        _print_error("aborted")
        return 1
    except SystemExit as ended:  # raised by completion and by commands that exit themselves
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return code if isinstance(code, int) else 0


def _print_error(line: str) -> None:
    console.print(Text("error: ", "red").append(printable(line), "default"))


def say(text: str) -> None:
    """Print one line for a person to standard error. Markup in names is not interpreted."""
    console.print(printable(text), markup=False)


@contextmanager
def faults() -> Iterator[None]:
    """Exit codes: 2 for wrong settings and arguments, 1 for what did not work, 128 + n after signal n."""
    try:
        interruptible()
        yield
    except TransferQueueError as error:
        for line in str(error).splitlines():
            _print_error(line)
        raise typer.Exit(2 if isinstance(error, _WRONG_ARGUMENT) else 1) from None
    except Interrupted as signalled:
        raise typer.Exit(signalled.exit_code) from None
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
