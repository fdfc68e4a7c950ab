"""Safe output of user text: names, keys, tags and errors must not move the cursor, recolor or forge lines."""

from __future__ import annotations

import logging

__all__ = ["PrintableFormatter", "log_to_stderr", "printable", "printable_lines"]


def printable(text: str) -> str:
    r"""Escape characters that are not printable: control characters, line ends, separators, and direction marks.

    Args:
        text: Any text, for example the name of a partition.

    Returns:
        One line, in which each character that is not printable is replaced by its Python escape.

    Example:
        >>> printable("train\x1b[2J\n")
        'train\\x1b[2J\\n'
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )


def printable_lines(text: str) -> str:
    """Escape all but line ends, as `printable` does."""
    return "\n".join(map(printable, text.split("\n")))


class PrintableFormatter(logging.Formatter):
    """Log lines of a server: each message is one line, and tracebacks hold no control characters."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name of the base class
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802 - the name of the base class
        return printable_lines(super().formatException(ei))  # type: ignore[arg-type]


def log_to_stderr(level: int = logging.WARNING) -> None:
    """Configure a server to log to standard error, in lines without control characters."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter())
    logging.basicConfig(level=level, handlers=[handler])
