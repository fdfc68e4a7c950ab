"""Columnar blocks: how batches are laid out in memory and on the wire.

``block`` and everything it needs is numpy only, for servers. ``tensors`` turns batches into blocks and back, for
clients. The names exported here pack single objects into buffers that the caller owns.
"""

from __future__ import annotations

from transfer_queue.columns.objects import batch_decode_from, batch_encode_into
from transfer_queue.columns.packing import calc_packed_size, pack_into, unpack_from

__all__ = ["batch_decode_from", "batch_encode_into", "calc_packed_size", "pack_into", "unpack_from"]
