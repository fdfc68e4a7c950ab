"""Batches of tensors and values to blocks and back, for clients. Importing this imports torch and tensordict."""

from __future__ import annotations

from transfer_queue.columns.decoding import Layout, Piece, decode, decode_into
from transfer_queue.columns.encoding import encode, split

__all__ = ["Layout", "Piece", "decode", "decode_into", "encode", "split"]
