"""Usage errors: empty words, and options that the user left out."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperCommand

__all__ = ["HelpfulCommand", "UsageError"]

UsageError: Any = typer.BadParameter.__base__  # its module differs between releases of typer

_BARE: Final[dict[str | None, tuple[str, ...]]] = {
    "up": ("--file",),
    "doctor": ("--file",),
    "status": ("--queue",),
    "top": ("--queue",),
    "why": ("--partition",),
    "bench": ("--backend",),
    "plan": ("--gpus", "--seq"),
    "reset": ("--task",),
    "tail": ("--count",),
    "drain": ("--timeout",),
}
"""The options whose values people give without naming the option."""
_DOCUMENTS: Final = {".yaml", ".yml", ".json"}


class HelpfulCommand(TyperCommand):
    """A command that refuses empty words. Its usage errors have ``meant``: the surplus words with the options that they
    probably belong to."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except UsageError as error:
            error.meant = self._meant(ctx, given)
            raise
        if given[-1:] == ["--"] and not ctx.params.get("command", True):
            raise UsageError("a command is missing after --", ctx=ctx)
        for parameter in self.params if not ctx.resilient_parsing else ():
            value = ctx.params.get(str(parameter.name))
            if "" in (value if isinstance(value, list | tuple) else [value]):
                name = max(parameter.opts, key=len)
                raise UsageError(f"{name} is empty; is a variable of the shell not set?", ctx=ctx)
        return rest

    def _meant(self, ctx: Any, given: list[str]) -> str:
        if self.name == "get" and len(given) == 1 and not given[0].startswith("-"):
            return shlex.join(["tq", "ls", given[0]])
        if self.name == "top" and "-n" in given:
            return "tq top --once"
        known = {name for parameter in self.params for name in parameter.opts}
        options = [name for name in _BARE.get(self.name, ()) if name in known]
        try:
            found, words, _ = self.make_parser(ctx).parse_args(args=given)
        except UsageError:  # it is about an option that is given
            return ""
        if "command" in found:  # of tq up, which takes all words
            if found.get("file") is not None:
                return ""
            words = list(found["command"] or ())
            words = words if words and _is_document(words[0]) else ["queue.yaml", *(["--"] if words else []), *words]
        if not options or not words:
            return ""
        named = [part for pair in zip(options, words, strict=False) for part in pair]
        return shlex.join([*named, *words[len(options) :]])


def _is_document(word: str) -> bool:
    path = Path(word)
    return word == "-" or path.suffix in _DOCUMENTS or (path.is_file() and shutil.which(word) is None)
