"""Frames: whatever the pieces in which bytes arrive, the same messages come out; nothing is allocated on a claim."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.config.attach import Target
from transfer_queue.control.commands import ListPartitions
from transfer_queue.errors import CapacityError, RequestError, StorageKeyNotFoundError, WaitTimeoutError
from transfer_queue.wire import frames
from transfer_queue.wire.frames import Incoming, Limits, MessageReader, MessageWriter, ProtocolError
from transfer_queue.wire.messages import (
    PROTOCOL,
    ControllerRequest,
    Envelope,
    Failure,
    Hello,
    Kind,
    Put,
    UnitRequest,
    Welcome,
)

ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(Envelope[ControllerRequest | Put])


def fresh(envelope: Envelope[Any], nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def encode(*writers: MessageWriter) -> bytes:
    """The frames of several messages in turns, as a connection sends them."""
    out = bytearray()
    waiting = list(writers)
    while waiting:
        writer = waiting.pop(0)
        for piece in writer.next_frame(ENCODER):
            out += piece
        if not writer.done:
            waiting.append(writer)
    return bytes(out)


def feed(reader: MessageReader, data: bytes, sizes: list[int]) -> list[Incoming]:
    """Give ``data`` to a reader in pieces of at most ``sizes`` (repeated) bytes."""
    messages: list[Incoming] = []
    position = turn = 0
    while position < len(data):
        buffer = reader.buffer()
        size = min(len(buffer), sizes[turn % len(sizes)], len(data) - position)
        buffer[:size] = data[position : position + size]
        messages += reader.received(size)
        position += size
        turn += 1
    return messages


def request(number: int, payload: bytes = b"", body: Any = None) -> MessageWriter:
    envelope = Envelope(Kind.REQUEST, number, 0, body or Put(number))
    half = len(payload) // 2
    return MessageWriter(ENCODER, envelope, [payload[:half], memoryview(payload)[half:]])


@settings(deadline=None, max_examples=60)
@given(
    payloads=st.lists(st.integers(0, 300_000), min_size=1, max_size=5),
    sizes=st.lists(st.sampled_from([1, 3, 17, 1000, 40_000, 1 << 20]), min_size=1, max_size=4).filter(
        lambda found: max(found) >= 1000
    ),
    chunk=st.sampled_from([1000, 50_000, 4 << 20]),
)
def test_messages_survive_any_cutting_and_interleaving(payloads: list[int], sizes: list[int], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "CHUNK", chunk)
        bodies = [bytes([number + 1]) * size for number, size in enumerate(payloads)]
        data = encode(*(request(number, body) for number, body in enumerate(bodies)))
    messages = feed(MessageReader(DECODER, fresh), data, sizes)
    assert sorted(message.envelope.id for message in messages) == list(range(len(bodies)))
    for message in messages:
        assert message.envelope.body == Put(message.envelope.id)
        assert bytes(message.target or b"") == bodies[message.envelope.id]


def test_short_messages_pass_between_the_pieces_of_a_long_one() -> None:
    data = encode(request(1, bytes(3 * frames.CHUNK)), request(2, b"short"))
    messages = feed(MessageReader(DECODER, fresh), data, [1 << 20])
    assert [message.envelope.id for message in messages] == [2, 1]


def test_a_payload_is_received_straight_into_the_chosen_buffer() -> None:
    target = bytearray(1 << 20)
    reader = MessageReader(DECODER, lambda envelope, nbytes: memoryview(target)[:nbytes])
    (message,) = feed(reader, encode(request(1, b"x" * (1 << 20))), [300_000])
    assert message.target is not None
    assert target == b"x" * (1 << 20)
    begun = encode(request(2, b"y" * (1 << 20)))[: 200 << 10]
    assert feed(reader, begun, [1 << 20]) == []
    assert reader.buffer().obj is target  # the rest needs no copy


def test_a_header_larger_than_the_staging_buffer_is_received() -> None:
    body = ListPartitions("p" * 1_000_000)
    (message,) = feed(MessageReader(DECODER, fresh), encode(request(1, b"abc", body)), [70_000])
    assert message.envelope.body == body
    assert bytes(message.target or b"") == b"abc"


def test_a_refused_payload_is_drained_and_the_stream_goes_on() -> None:
    def refuse(envelope: Envelope[Any], nbytes: int) -> memoryview:
        if nbytes > 10:
            raise CapacityError("too much")
        return memoryview(bytearray(nbytes))

    first, second = feed(MessageReader(DECODER, refuse), encode(request(1, bytes(500_000)), request(2, b"ok")), [9000])
    assert isinstance(first.refused, CapacityError)
    assert first.target is None
    assert bytes(second.target or b"") == b"ok"


def test_a_forgotten_message_no_longer_writes_to_its_buffer() -> None:
    target = bytearray(200_000)
    reader = MessageReader(DECODER, lambda envelope, nbytes: memoryview(target))
    data = encode(request(1, b"x" * 200_000))
    feed(reader, data[:100_000], [100_000])
    reader.forget(Kind.REQUEST, 1)
    target[:] = bytes(200_000)
    (message,) = feed(reader, data[100_000:], [50_000])
    assert message.envelope.id == 1
    assert target == bytes(200_000)


def head(magic: int = frames.MAGIC, header: int = 0, payload: int = 0) -> bytes:
    return struct.pack("<IIQ", magic, header, payload)


def frame(envelope: Envelope[Any], payload: int) -> bytes:
    header = ENCODER.encode(envelope)
    return head(header=len(header), payload=payload) + header


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GET / HTTP/1.1\r\n", "not a TransferQueue peer"),
        (head(header=(16 << 20) + 1), "exceeds the limit"),
        (head(header=4) + b"\xc1\xc1\xc1\xc1", "malformed header"),
        (head(header=3) + b"\x93\x00\x01", "malformed header"),
        (frame(Envelope(Kind.REQUEST, 1, 1 << 60, Put(1)), 10), "exceeds the limit"),
        (frame(Envelope(Kind.REQUEST, 1, -5, Put(1)), 0), "exceeds the limit"),
        (frame(Envelope(Kind.REQUEST, 1, 5, Put(1)), 6), "does not fit"),
        (frame(Envelope(Kind.REQUEST, 1, 5, Put(1)), 0), "does not fit"),
        (frame(Envelope(Kind.REQUEST, 1, 0, Put(1)), 1), "does not fit"),
        (frame(Envelope(Kind.MORE_REQUEST, 1), 1), "unknown message"),
        (
            frame(Envelope(Kind.REQUEST, 1, 9, Put(1)), 3) + b"abc" + frame(Envelope(Kind.REQUEST, 1, 9, Put(1)), 3),
            "twice",
        ),
    ],
    ids=[
        "another protocol",
        "huge header",
        "no msgpack",
        "truncated array",
        "huge payload",
        "negative payload",
        "frame too long",
        "empty frame",
        "payload out of nowhere",
        "continuation of nothing",
        "id used twice",
    ],
)
def test_what_is_not_the_protocol_is_refused_before_allocation(data: bytes, text: str) -> None:
    allocated: list[int] = []

    def choose(envelope: Envelope[Any], nbytes: int) -> memoryview:
        allocated.append(nbytes)
        return memoryview(bytearray(nbytes))

    with pytest.raises(ProtocolError, match=text):
        feed(MessageReader(DECODER, choose), data, [1 << 20])
    assert sum(allocated) <= 16


def test_open_streams_are_bounded() -> None:
    reader = MessageReader(DECODER, fresh, Limits(streams=3))
    begun = [frame(Envelope(Kind.REQUEST, number, 9, Put(number)), 3) + b"abc" for number in range(4)]
    assert feed(reader, b"".join(begun[:3]), [1000]) == []
    with pytest.raises(ProtocolError, match="too many"):
        feed(reader, begun[3], [1000])


@settings(deadline=None, max_examples=300)
@given(data=st.binary(max_size=200), keep=st.integers(0, 40))
def test_random_bytes_end_in_a_protocol_error_or_wait_for_more(data: bytes, keep: int) -> None:
    valid = encode(request(1, b"payload"))
    reader = MessageReader(DECODER, fresh)
    try:
        feed(reader, valid[:keep] + data, [64])
    except ProtocolError:
        return
    assert len(reader.buffer()) > 0


def test_an_error_arrives_as_its_own_class_with_its_text() -> None:
    for error in (CapacityError("full"), WaitTimeoutError("late"), StorageKeyNotFoundError("gone")):
        back = Failure.of(error).exception()
        assert type(back) is type(error)
        assert str(back) == str(error)
    foreign = Failure.of(ZeroDivisionError("by zero")).exception()
    assert type(foreign) is RequestError
    assert str(foreign) == "ZeroDivisionError: by zero"
    hostile = Failure("RequestError", "no\x1b]0;mine\x07\nWARNING all is well \u202e").exception()
    assert str(hostile) == r"no\x1b]0;mine\x07\nWARNING all is well \u202e"
    mismatch = Target("mine").mismatch("\x1b[2J", None, "localhost:1")
    assert mismatch is not None
    assert r"serves queue \x1b[2J" in mismatch
    unknown = Failure("SystemExit", "no").exception()
    assert type(unknown) is RequestError


def test_a_storage_unit_does_not_take_controller_commands() -> None:
    decoder = msgspec.msgpack.Decoder(Envelope[UnitRequest])
    data = ENCODER.encode(Envelope(Kind.REQUEST, 1, 0, ListPartitions("")))
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(data)
    hello = Envelope(Kind.REQUEST, 1, 0, Hello("client", "me"))
    assert decoder.decode(ENCODER.encode(hello)).body == hello.body


def test_the_handshake_says_its_protocol_even_where_the_other_side_would_assume_it() -> None:
    for message in (Hello("client", "me"), Welcome("controller")):
        assert msgspec.msgpack.decode(ENCODER.encode(message))["protocol"] == PROTOCOL


def test_readers_of_a_thread_share_a_buffer_but_for_the_rest_of_a_header() -> None:
    def reader() -> MessageReader:
        return MessageReader(msgspec.msgpack.Decoder(Envelope[Hello]), lambda envelope, nbytes: None)

    def feed(into: MessageReader, data: bytes) -> list[Incoming]:
        into.buffer()[: len(data)] = data
        return list(into.received(len(data)))

    frames = [
        bytes(MessageWriter(ENCODER, Envelope(Kind.REQUEST, 7, 0, Hello("client", name))).next_frame(ENCODER)[0])
        for name in ("first", "second")
    ]
    first, second = reader(), reader()
    assert first.buffer().obj is second.buffer().obj
    assert feed(first, frames[0][:21]) == []
    [got] = feed(second, frames[1])
    assert got.envelope.body == Hello("client", "second")
    [got] = feed(first, frames[0][21:])
    assert got.envelope.body == Hello("client", "first")
    assert first.buffer().obj is second.buffer().obj
