"""Mutual proof that two processes know one secret, which is never sent.

A client's proof holds for one nonce and one port, so that a program that listens where a server was cannot use it at
another server. The server's proof answers the same nonce. A nonce begins with the time since the machine started, so
that a server on the same machine refuses one that was made before it listened, or long ago.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from typing import Literal

__all__ = ["NONCE_BYTES", "is_fresh", "is_proof", "masked", "new_nonce", "new_secret", "prove"]

NONCE_BYTES = 16
_FRESH_NS = 60 * 10**9


def new_secret() -> str:
    """Make a secret of 256 bits."""
    return secrets.token_hex(32)


def new_nonce() -> bytes:
    """Make a nonce for one connection."""
    return time.monotonic_ns().to_bytes(8, "big") + secrets.token_bytes(NONCE_BYTES - 8)


def is_fresh(nonce: bytes, since_ns: int) -> bool:
    """Whether a process of this machine made ``nonce`` after ``since_ns``, and a minute ago at most.

    The monotonic clock is the same for all processes of a machine, and changes of the wall clock do not move it.
    """
    made, now = int.from_bytes(nonce[:8], "big"), time.monotonic_ns()
    return max(since_ns, now - _FRESH_NS) <= made <= now


def prove(secret: str, who: Literal["client", "server"], port: int, nonce: bytes) -> bytes:
    """Proof of knowing ``secret``, for one connection to ``port`` with ``nonce``."""
    return hmac.digest(secret.encode(), b"%s %d " % (who.encode(), port) + nonce, hashlib.sha256)


def masked(other: str, secret: str, port: int, nonce: bytes) -> str:
    """Another secret as it is sent to a process that knows ``secret``, and back: hexadecimal digits of 32 bytes."""
    pad = prove(secret, "server", port, nonce)
    return bytes(one ^ two for one, two in zip(bytes.fromhex(other), pad, strict=True)).hex()


def is_proof(proof: object, secret: str, who: Literal["client", "server"], port: int, nonce: bytes) -> bool:
    """Whether ``proof`` equals the result of :func:`prove`, compared in constant time."""
    if not isinstance(proof, bytes) or len(nonce) != NONCE_BYTES:
        return False
    return hmac.compare_digest(proof, prove(secret, who, port, nonce))
