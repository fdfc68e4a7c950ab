"""Bases of messages, by which the unions of `transfer_queue.wire.messages` find them."""

from __future__ import annotations

import msgspec

__all__ = ["FromController", "Message"]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of messages that are no requests to a controller; the class name is the tag."""


class FromController(Message, frozen=True, tag=True, omit_defaults=True):
    """Base of what a controller sends, besides the replies to commands."""
