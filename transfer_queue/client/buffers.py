"""Registered buffers as a private 0.1.5 names them; here a get gives independent copies and holds no buffer."""

from __future__ import annotations

from enum import Enum

from transfer_queue.errors import InvalidTypeError

__all__ = ["RegisterBufferType", "check_buffer_type"]


class RegisterBufferType(Enum):
    """What a registered buffer is for."""

    GET_BYTES = "get_bytes"
    GET_TENSOR = "get_tensor"
    PUT_TENSOR = "put_tensor"
    PUT_BYTES = "put_bytes"


def check_buffer_type(value: object) -> RegisterBufferType:
    if not isinstance(value, RegisterBufferType):
        raise InvalidTypeError(f"buffer_type must be a RegisterBufferType, not {type(value).__name__}")
    return value
