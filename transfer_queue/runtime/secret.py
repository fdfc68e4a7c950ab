"""Mutual proof that two processes know one secret, which is never sent.

Each side of a connection chooses a nonce, and both proofs are for both nonces, so that a handshake that was recorded is
of no use at any later time. They are also for one port, so that a program that listens where a server was cannot pass a
handshake on to a server at another port.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

__all__ = ["NONCE_BYTES", "is_proof", "masked", "new_nonce", "new_secret", "prove"]

NONCE_BYTES = 16


def new_secret() -> str:
    """Make a secret of 256 bits."""
    return secrets.token_hex(32)


def new_nonce() -> bytes:
    """Make a nonce for one connection."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(secret: str, who: Literal["client", "server"], port: int, nonce: bytes) -> bytes:
    """Proof of knowing ``secret``, for one connection to ``port`` with ``nonce``."""
    return hmac.digest(secret.encode(), b"%s %d " % (who.encode(), port) + nonce, hashlib.sha256)


def masked(other: str, secret: str, port: int, nonce: bytes) -> str:
    """Another secret as it is sent to a process that knows ``secret``, and back: hexadecimal digits of 32 bytes."""
    pad = prove(secret, "server", port, nonce)
    return bytes(one ^ two for one, two in zip(bytes.fromhex(other), pad, strict=True)).hex()


def is_proof(proof: object, secret: str, who: Literal["client", "server"], port: int, nonce: bytes) -> bool:
    """Whether ``proof`` equals the result of :func:`prove`, compared in constant time."""
    if not isinstance(proof, bytes) or len(nonce) < NONCE_BYTES:
        return False
    return hmac.compare_digest(proof, prove(secret, who, port, nonce))
