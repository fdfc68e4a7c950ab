"""``kubectl tq``: the plugin ``kubectl-tq``, and ``kubectl_complete-tq``, which kubectl asks what may come next."""

from __future__ import annotations

import io
import os
import shlex
import sys
from contextlib import redirect_stdout

__all__ = ["complete", "main"]

_COMPLETE = "_KUBECTL_TQ_COMPLETE"
_NO_FILES, _FILES = ":4", ":0"
"""Directives of cobra, which completes kubectl: file names are offered where nothing else is."""


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: done; 1: it did not work; 2: a setting or argument is wrong. Standard error says why."""
    from tq_operator.kubectl.app import app
    from transfer_queue.cli.faults import run

    return run(app, arguments, prog_name="kubectl tq", complete_var=_COMPLETE)


def complete(words: list[str] | None = None) -> int:
    """Print what may stand for the last of ``words`` (of the command line), a line each, as kubectl wants it."""
    from typer.completion import completion_init  # type: ignore[attr-defined]

    *before, last = (sys.argv[1:] if words is None else words) or [""]
    completion_init()
    text = shlex.join(["kubectl-tq", *before])
    os.environ["_TYPER_COMPLETE_ARGS"] = f"{text} {shlex.quote(last) if last else ''}"
    os.environ["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"  # the form that cobra reads: value, tab, help
    os.environ[_COMPLETE] = "complete_fish"
    found = io.StringIO()
    with redirect_stdout(found):
        main([])
    lines = found.getvalue().strip("\n")
    print("\n".join([*filter(None, [lines]), _NO_FILES if lines else _FILES]))
    return 0
