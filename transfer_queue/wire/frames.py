"""Frames: how messages lie on a byte stream. No I/O here; :mod:`transfer_queue.runtime.connection` drives it.

A frame is ``u32 magic+version | u32 header bytes | u64 payload bytes | header | payload``, little-endian; the header
is a msgpack :class:`~transfer_queue.wire.messages.Envelope`. A message whose payload exceeds ``CHUNK`` continues in
further frames, so that short messages pass between the pieces of long ones.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from transfer_queue.errors import InvalidInputError, RequestError, TransferQueueError
from transfer_queue.wire.messages import Envelope, Kind

__all__ = [
    "CHUNK",
    "DEFAULT_LIMITS",
    "HELLO_BYTES",
    "STRANGER_LIMITS",
    "Buffer",
    "HttpPeerError",
    "Incoming",
    "Limits",
    "MessageReader",
    "MessageWriter",
    "ProtocolError",
]

MAGIC = 0x5451_0001
"""``TQ`` and the version of the frame format."""
_HTTP = int.from_bytes(b"HTTP", "little")
CHUNK = 4 << 20
"""Most payload bytes in one frame."""
HELLO_BYTES = 8 << 10
"""Most bytes of a Hello, and of any other header from a peer that is not admitted yet."""
_HEAD = struct.Struct("<IIQ")
_ANY_BODY = msgspec.msgpack.Decoder(Envelope[object])
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_STAGING = 128 << 10
_GROWTH = 16
"""Growth of the buffer for a long header. Pages of it that nothing is received into take no memory."""
_DIRECT = 32 << 10
"""From this many outstanding payload bytes on they go straight into the target, not through the staging buffer."""

Buffer = memoryview | bytes | bytearray
_of_thread = threading.local()


def _thread_staging() -> memoryview:
    """Where all readers of a thread receive. Most keep nothing there from one read to the next: thousands of idle
    connections share one buffer, and a busy process one that is warm."""
    staging: memoryview | None = getattr(_of_thread, "staging", None)
    if staging is None:
        staging = _of_thread.staging = memoryview(bytearray(_STAGING))
    return staging


class ProtocolError(RequestError):
    """The peer sent bytes that are not this protocol; the connection is closed."""


class HttpPeerError(ProtocolError):
    """The peer answered in HTTP."""


@dataclass(frozen=True)
class Limits:
    """Bytes that a peer may make this side allocate; checked before anything is allocated."""

    header: int = 16 << 20
    """Of a frame. Senders that know the receiver's limit keep to it, see ``MessageWriter``."""
    payload: int = 1 << 42
    """Of a whole message."""
    streams: int = 4096
    """Messages in several frames under way at once."""


DEFAULT_LIMITS = Limits()
STRANGER_LIMITS = Limits(header=HELLO_BYTES, payload=0, streams=0)
"""Limits until the Hello of a peer is accepted."""


class MessageWriter:
    """An outgoing message, taken frame by frame with ``next_frame``."""

    __slots__ = ("_header", "_header_rest", "_left", "_more", "_offset", "_segments", "id")

    def __init__(
        self,
        encoder: msgspec.msgpack.Encoder,
        envelope: Envelope[Any],
        payload: Sequence[Buffer] = (),
        header_limit: int | None = None,
        value: Sequence[bytes] = (),
    ) -> None:
        """``value``: the body in msgpack, in parts, which are not copied. The envelope has ``msgspec.Raw(b"")`` in its
        place.

        Raises InvalidInputError for a message that cannot be encoded or exceeds ``header_limit`` bytes."""
        self._segments = [view for view in map(_as_bytes, payload) if len(view)] if payload else []
        envelope.total = self._left = sum(map(len, self._segments))
        header = bytearray(_HEAD.size)
        what = type(envelope.body).__name__
        try:
            encoder.encode_into(envelope, header, _HEAD.size)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidInputError(f"{what} holds a value that cannot be sent: {error}") from None
        if header_limit is not None and len(header) - _HEAD.size > header_limit:
            raise InvalidInputError(
                f"{what} takes {len(header) - _HEAD.size} bytes beside its data, more than {header_limit}: "
                "name fewer rows at once, or use shorter keys and smaller tags"
            )
        self._header = header
        self._header_rest: Sequence[bytes] = ()
        if value:
            end = bytes(header[-1:])  # what an envelope has behind its body: the floor of a reply, one byte
            del header[-1:]
            self._header_rest = [*value, end]
        self._offset = 0
        self._more = Kind.MORE_REPLY if envelope.kind == Kind.REPLY else Kind.MORE_REQUEST
        self.id = envelope.id

    @property
    def unsent(self) -> int:
        """Bytes of the header or of the payload that are in no frame yet."""
        return self.unsent_header + self._left

    @property
    def unsent_header(self) -> int:
        """Bytes of the header that are in no frame yet. They were made for this message; a payload is the caller's."""
        return len(self._header) + sum(map(len, self._header_rest))

    @property
    def done(self) -> bool:
        return not self._header and self._left == 0

    def next_frame(self, encoder: msgspec.msgpack.Encoder) -> list[Buffer]:
        """The buffers of the next frame, in order; payload buffers are the caller's own, not copies."""
        header, self._header = self._header, bytearray()
        if not header:
            header = bytearray(_HEAD.size)
            encoder.encode_into(Envelope(self._more, self.id), header, _HEAD.size)
        size = min(self._left, CHUNK)
        rest, self._header_rest = self._header_rest, ()
        _HEAD.pack_into(header, 0, MAGIC, len(header) - _HEAD.size + sum(map(len, rest)), size)
        frame: list[Buffer] = [header, *rest]
        self._left -= size
        while size:
            segment = self._segments[0]
            piece = segment[self._offset : self._offset + size]
            frame.append(piece)
            size -= len(piece)
            self._offset += len(piece)
            if self._offset == len(segment):
                del self._segments[0]
                self._offset = 0
        return frame


class Incoming:
    """A message being received. ``target`` None with ``total`` > 0: the payload is thrown away.

    ``refused``: why the receiver does not take it; its body is None if it could not be decoded.
    """

    __slots__ = ("envelope", "filled", "refused", "target", "total")

    def __init__(self, envelope: Envelope[Any]) -> None:
        self.envelope = envelope
        self.total = envelope.total
        self.filled = 0
        self.target: memoryview | None = None
        self.refused: TransferQueueError | None = None


class MessageReader:
    """Turns received bytes into messages.

    The host asks ``buffer()`` where to receive and then calls ``received(n)``, in one thread and with no other reader's
    turn between the two. ``choose(envelope, nbytes)`` names the
    buffer a payload goes to; if it raises, the payload is thrown away and the message arrives with ``refused`` set.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[Any],
        choose: Callable[[Envelope[Any], int], memoryview | None],
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._decoder = decoder
        self._choose = choose
        self.limits = limits
        """May change between two messages."""
        self._staging = _thread_staging()
        self._start = self._end = 0
        self._streams: dict[int, Incoming] = {}
        self._current: Incoming | None = None
        self._left = 0  # payload bytes of the current frame still to come
        self._direct = False

    def buffer(self) -> memoryview:
        """Where the next bytes shall be received; valid until ``received``."""
        self._direct = self._left >= _DIRECT and self._start == self._end
        if self._direct:
            assert self._current is not None
            target, filled = self._current.target, self._current.filled
            if target is not None:
                return target[filled : filled + self._left]
            return _thread_staging()[: min(self._left, _STAGING)]
        if self._start == self._end:
            self._staging = _thread_staging()
            self._start = self._end = 0
        return self._staging[self._end :]

    def received(self, nbytes: int) -> Iterator[Incoming]:
        """Messages completed by ``nbytes`` more bytes in the buffer, each before what follows it is looked at: it may
        change the ``limits``. To be used up, unless the connection ends. Raises ProtocolError.
        """
        if self._direct:
            yield from self._advance(nbytes)
            return
        self._end += nbytes
        while self._start < self._end:
            if self._left:
                size = min(self._left, self._end - self._start)
                self._copy(size)
                self._start += size
                yield from self._advance(size)
            elif self._begin_frame():
                if self._left == 0:
                    yield from self._advance(0)
            else:
                self._keep_rest()
                break

    def forget(self, envelope_kind: int, request: int) -> None:
        """Throw away what still arrives for a message: its target may no longer be written."""
        incoming = self._streams.get(_stream_key(envelope_kind, request))
        if incoming is not None:
            incoming.target = None

    def hold(self) -> None:
        """Pause: the host does not continue `received` for now, and other readers may receive meanwhile."""
        if self._start < self._end and self._staging is _thread_staging():
            own = memoryview(bytearray(self._staging[self._start : self._end]))
            self._staging, self._start, self._end = own, 0, len(own)

    def close(self) -> None:
        """Stop receiving. Drops all references, including the host, so that both are freed at once."""
        self._choose = _no_target
        self._staging = _thread_staging()
        self._start = self._end = self._left = 0
        self._current = None
        self._streams.clear()

    def _copy(self, size: int) -> None:
        assert self._current is not None
        target, filled = self._current.target, self._current.filled
        if target is not None:
            target[filled : filled + size] = self._staging[self._start : self._start + size]

    def _advance(self, size: int) -> tuple[Incoming, ...]:
        """The current message, if ``size`` more bytes of its payload complete it."""
        incoming = self._current
        assert incoming is not None
        incoming.filled += size
        self._left -= size
        if self._left == 0:
            self._current = None
            if incoming.filled == incoming.total:
                self._streams.pop(_stream_key(incoming.envelope.kind, incoming.envelope.id), None)
                return (incoming,)
        return ()

    def _begin_frame(self) -> bool:
        """Parse the next frame's header if all of it is here."""
        available = self._end - self._start
        if available < _HEAD.size:
            self._make_room(_HEAD.size)
            return False
        magic, header_bytes, payload_bytes = _HEAD.unpack_from(self._staging, self._start)
        if magic == _HTTP:
            raise HttpPeerError("it serves HTTP")
        if magic != MAGIC:
            raise ProtocolError(f"not a TransferQueue peer, or another version: frame starts with {magic:#x}")
        if header_bytes > self.limits.header:
            raise ProtocolError(f"header of {header_bytes} bytes exceeds the limit of {self.limits.header}")
        if available < _HEAD.size + header_bytes:
            self._make_room(_HEAD.size + header_bytes)
            return False
        start = self._start + _HEAD.size
        envelope, refused = self._decode(self._staging[start : start + header_bytes])
        self._start = start + header_bytes
        if envelope.kind >= Kind.MORE_REQUEST:
            self._current = self._continued(envelope)
        else:
            self._current = self._begun(envelope, refused)
        incoming = self._current
        if payload_bytes > incoming.total - incoming.filled or (payload_bytes == 0 and incoming.total):
            raise ProtocolError(f"frame of {payload_bytes} payload bytes does not fit its message of {incoming.total}")
        self._left = payload_bytes
        return True

    def _decode(self, header: memoryview) -> tuple[Envelope[Any], TransferQueueError | None]:
        """The envelope; with an error, if it is sound but for the body of a request or reply.

        One wrong message fails alone then: the others of its connection are not to blame.
        """
        try:
            return self._decoder.decode(header), None
        except _UNDECODABLE as error:
            problem = str(error)
        try:
            envelope: Envelope[Any] = _ANY_BODY.decode(header)
        except _UNDECODABLE:
            raise ProtocolError(f"malformed header: {problem}") from None
        if envelope.kind not in (Kind.REQUEST, Kind.REPLY):
            raise ProtocolError(f"malformed header: {problem}")
        envelope.body = None
        return envelope, RequestError(f"malformed message: {problem}")

    def _begun(self, envelope: Envelope[Any], refused: TransferQueueError | None) -> Incoming:
        incoming = Incoming(envelope)
        incoming.refused = refused
        if incoming.total == 0:
            return incoming
        key = _stream_key(envelope.kind, envelope.id)
        if not 0 < incoming.total <= self.limits.payload:
            raise ProtocolError(f"payload of {incoming.total} bytes exceeds the limit of {self.limits.payload}")
        if key in self._streams or len(self._streams) >= self.limits.streams:
            raise ProtocolError("too many messages under way, or one id used twice")
        try:
            if refused is None:
                incoming.target = self._choose(envelope, incoming.total)
        except TransferQueueError as error:
            incoming.refused = error
        self._streams[key] = incoming
        return incoming

    def _continued(self, envelope: Envelope[Any]) -> Incoming:
        kind = Kind.REPLY if envelope.kind == Kind.MORE_REPLY else Kind.REQUEST
        incoming = self._streams.get(_stream_key(kind, envelope.id))
        if incoming is None:
            raise ProtocolError(f"continuation of unknown message {envelope.id}")
        return incoming

    def _keep_rest(self) -> None:
        """Part of a header is here: others may not receive over it."""
        if self._staging is _thread_staging():
            pending = self._end - self._start
            own = memoryview(bytearray(max(pending + 1, min(_STAGING, _HEAD.size + self.limits.header))))
            own[:pending] = self._staging[self._start : self._end]
            self._staging = own
            self._start, self._end = 0, pending

    def _make_room(self, needed: int) -> None:
        """Room for ``needed`` bytes from ``_start`` on; grows with the bytes that came, not with what is claimed."""
        pending = self._end - self._start
        if self._start + needed <= len(self._staging) and self._end < len(self._staging):
            return
        size = len(self._staging)
        if pending >= size // 2 and needed > size:
            size = min(max(needed, _STAGING), size * _GROWTH)
        staging = self._staging if size == len(self._staging) else np.empty(size, np.uint8).data
        staging[:pending] = self._staging[self._start : self._end]
        self._staging = staging
        self._start, self._end = 0, pending


def _stream_key(kind: int, request: int) -> int:
    """Requests and replies number their streams apart."""
    return ~request if kind == Kind.REPLY else request


def _no_target(envelope: Envelope[Any], nbytes: int) -> None:
    """The host of a closed reader."""


def _as_bytes(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
