"""Strings as UTF-8 and back: long ones straight between their own memory and the block, short ones together."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np

from transfer_queue.columns.column import Bytes, ColumnView, Int64s, as_bytes
from transfer_queue.errors import CorruptBlockError

__all__ = ["LONG_BYTES", "decode_texts", "encode_texts"]

LONG_BYTES: Final = 4096
"""A string of at least this size is a chunk of its own."""
_DIRECT_BYTES: Final = 512
"""Strings that are longer than this on average are decoded one by one: all together pass through memory three times."""

_utf8_of: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
    ("PyUnicode_AsUTF8AndSize", ctypes.pythonapi)
)


class _Memory:
    """The characters of an ASCII string where they lie, for numpy, whose arrays keep the string alive."""

    __slots__ = ("__array_interface__", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.__array_interface__ = {
            "data": (_utf8_of(text, None), True),  # ASCII strings are their own UTF-8
            "shape": (len(text),),
            "typestr": "|u1",
            "version": 3,
        }


def encode_texts(texts: Sequence[str]) -> tuple[list[Bytes], Int64s]:
    """UTF-8 of the strings as chunks, and int64 ``(rows,)`` bytes of each. Long ASCII strings are not copied."""
    if max(map(len, texts), default=0) < LONG_BYTES:
        joined = "".join(texts)
        if joined.isascii():
            return [as_bytes(joined.encode())], np.fromiter(map(len, texts), np.int64, len(texts))
    chunks: list[Bytes] = []
    lengths = np.empty(len(texts), np.int64)
    short: list[bytes] = []
    for row, text in enumerate(texts):
        if len(text) >= LONG_BYTES:
            if short:
                chunks.append(as_bytes(b"".join(short)))
                short = []
            chunks.append(_utf8(text))
            lengths[row] = chunks[-1].nbytes
        else:
            short.append(text.encode("utf-8", "surrogatepass"))
            lengths[row] = len(short[-1])
    if short or not chunks:
        chunks.append(as_bytes(b"".join(short)))
    return chunks, lengths


def _utf8(text: str) -> Bytes:
    if text.isascii() and type(text) is str:
        return np.asarray(_Memory(text))
    return as_bytes(text.encode("utf-8", "surrogatepass"))


def decode_texts(column: ColumnView, rows: tuple[int, int] | Int64s) -> list[str | None]:
    """The picked rows of a text column. Raises CorruptBlockError for bytes that are not UTF-8."""
    together = column.value_bytes < _DIRECT_BYTES * column.rows
    if together:
        column = column.take(rows)
        rows = (0, column.rows)
    index = slice(*rows) if isinstance(rows, tuple) else rows
    lows, highs = column.starts[:-1][index].tolist(), column.starts[1:][index].tolist()
    raw = column.values.tobytes() if together else column.values.data
    texts: list[str | None]
    if isinstance(raw, bytes) and raw.isascii():
        text = raw.decode("ascii")
        texts = [text[low:high] for low, high in zip(lows, highs, strict=True)]
    else:
        try:
            texts = [str(raw[low:high], "utf-8", "surrogatepass") for low, high in zip(lows, highs, strict=True)]
        except UnicodeDecodeError as error:
            raise CorruptBlockError(f"column {column.schema.name!r} is damaged: {error}") from error
    if column.schema.dtype == "numpy.str_":
        texts = [np.str_(text) for text in texts]
    for row in [] if column.extents is None else np.flatnonzero(column.extents[index] < 0).tolist():
        texts[row] = None
    return texts
