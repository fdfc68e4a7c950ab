"""In what pieces TLS gets frames: all bytes in their order, long ones cut, short ones together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.runtime.connection import _PIECE, _SHORT, _pieces


@given(st.lists(st.sampled_from([0, 1, 60, _SHORT, _SHORT + 1, _PIECE - 1, _PIECE, _PIECE + 1, 3 * _PIECE])))
def test_nothing_is_lost_and_no_piece_of_payload_is_longer_than_what_is_encrypted_at_a_time(sizes: list[int]) -> None:
    frames = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    pieces = [bytes(piece) for piece in _pieces(frames)]
    assert b"".join(pieces) == b"".join(frames)
    assert all(pieces)
    assert all(len(piece) <= max(_PIECE, _SHORT * len(sizes)) for piece in pieces)


def test_short_frames_leave_in_one_piece() -> None:
    assert [bytes(piece) for piece in _pieces([b"a", b"b" * _SHORT, b"c"])] == [b"a" + b"b" * _SHORT + b"c"]
