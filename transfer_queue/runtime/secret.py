"""Mutual proof that two processes know one secret, which is never sent.

A client's proof holds for one nonce and one port, so that a program that listens where a server was cannot use it at
another server. The server's proof answers the same nonce.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

__all__ = ["NONCE_BYTES", "is_proof", "new_nonce", "new_secret", "prove"]

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


def is_proof(proof: object, secret: str, who: Literal["client", "server"], port: int, nonce: bytes) -> bool:
    """Whether ``proof`` equals the result of :func:`prove`, compared in constant time."""
    if not isinstance(proof, bytes) or len(nonce) != NONCE_BYTES:
        return False
    return hmac.compare_digest(proof, prove(secret, who, port, nonce))
