"""The wire format of protobuf, as far as the kubelet's plugin APIs need it: strings and messages."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["field", "fields"]

_VARINT, _BYTES = 0, 2


def field(number: int, content: bytes) -> bytes:
    """A string, bytes or message; ``number`` is below 16."""
    length, size = bytearray(), len(content)
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    length.append(size)
    return bytes([number << 3 | _BYTES, *length]) + content


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each string, bytes and message in ``message``; integers are passed over.

    Raises ValueError for what the plugin APIs do not send.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 not in (_VARINT, _BYTES):
            raise ValueError(f"a field of wire type {key & 7}")
        value, at = _varint(message, at)
        if key & 7 == _BYTES:
            yield key >> 3, message[at : at + value]
            at += value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The number at offset ``at``, and the offset after it."""
    value = shift = 0
    while message[at] > 127:
        value |= (message[at] & 127) << shift
        shift, at = shift + 7, at + 1
    return value | message[at] << shift, at + 1
