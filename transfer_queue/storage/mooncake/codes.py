"""Result codes of the engine, and what a person can do about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = [
    "GONE",
    "HAS_LEASE",
    "LEASE_EXPIRED",
    "NOT_REACHED",
    "NO_SPACE",
    "RETRIED",
    "TRANSFER_FAILED",
    "UNREGISTERED",
    "explain",
]

NO_SPACE: Final = -200
GONE: Final = -704
HAS_LEASE: Final = -706
LEASE_EXPIRED: Final = -707
TRANSFER_FAILED: Final = -800
NOT_REACHED: Final = -900
UNREGISTERED: Final = -10_000
"""Code of this library: the memory of a value could not be registered."""

RETRIED: Final = frozenset({TRANSFER_FAILED, LEASE_EXPIRED})
"""Reads and writes that may heal by themselves. Nothing else is repeated."""

_TEXTS = {
    NO_SPACE: "no space in any segment",
    -600: "refused as invalid; a value above the local buffer, an unregistered buffer or a wrong size",
    GONE: "no such key",
    -705: "the key exists",
    HAS_LEASE: "under lease",
    LEASE_EXPIRED: "the transfer took longer than the lease",
    TRANSFER_FAILED: (
        "the transfer failed: the storage unit is gone or unreachable; on RDMA often a device of the wrong NUMA node, "
        "set MC_ENABLE_DEST_DEVICE_AFFINITY=1 or name the device in deviceName"
    ),
    NOT_REACHED: "the Mooncake master does not answer",
    UNREGISTERED: "the memory could not be registered",
}
_SHOWN = 8


def explain(code: int, keys: Sequence[str]) -> str:
    """One line: what ``code`` means and the first of the ``keys`` it was given for."""
    shown = ", ".join(keys[:_SHOWN]) + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")
    return f"{_TEXTS.get(code, 'the engine failed')} ({code}): {shown}"
