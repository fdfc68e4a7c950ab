"""Run other programs; a failure carries the program's own last words."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.errors import ClusterError

TAIL_LINES = 20


def tail(text: str, lines: int = TAIL_LINES) -> str:
    """The last `lines` lines of `text`, indented for an error message."""
    return "\n".join("  | " + line for line in text.rstrip().splitlines()[-lines:])


def run(
    argv: Sequence[str | Path],
    *,
    stdin: str | Path | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    fix: str = "",
) -> str:
    """Run `argv` to its end and return its stdout.

    `stdin` is text, or the file to read; `environment` is added to the caller's. Raises ClusterError with the last
    lines of its output, and `fix` if given, when the program is missing or exits non-zero.
    """
    words = [str(word) for word in argv]
    variables = {**os.environ, **(environment or {})}
    try:
        if isinstance(stdin, Path):
            with stdin.open("rb") as file:
                done = subprocess.run(words, stdin=file, cwd=cwd, env=variables, capture_output=True)
        else:
            text = (stdin or "").encode()
            done = subprocess.run(words, input=text, cwd=cwd, env=variables, capture_output=True)
    except FileNotFoundError as error:
        raise ClusterError(f"cannot run {words[0]}: {error.strerror}. {fix}".rstrip()) from error
    output = done.stdout.decode(errors="replace")
    if done.returncode:
        shown = " ".join(words[:6]) + (" …" if len(words) > 6 else "")
        message = f"`{shown}` failed with exit status {done.returncode}. {fix}".rstrip()
        raise ClusterError(message + "\n" + tail(output + done.stderr.decode(errors="replace")))
    return output
