"""The ``TQ_`` variables that programs read: a misspelt name is warned about, a wrong value refused."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from typing import Final

from transfer_queue.errors import ConfigError

__all__ = ["VARIABLES", "check_values", "event_loop", "misspelt"]

VARIABLES: Final = frozenset(
    f"TQ_{name}"
    for name in (
        "CONFIG_FILE CONTROLLER_ADDRESS QUEUE_NAME QUEUE_UID INHERITED_FILE "
        "TLS_CA TLS_CERTIFICATE TLS_KEY TLS_SERVER_NAME TOKEN_FILE "
        "LAYOUT MISSING_FIELDS TRACES PUT_WAIT CONNECT_TIMEOUT SIMPLE_STORAGE_SEND_RECV_TIMEOUT "
        "CONTROLLER_GET_METADATA_TIMEOUT CONTROLLER_GET_METADATA_CHECK_INTERVAL "
        "STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL LOGGING_LEVEL NUM_THREADS EVENT_LOOP "
        "DEVICE_MEMORY RAY_CAPACITY MOONCAKE_ROLE MC_RPC_PORT MC_METADATA_SERVER_PORT YUANRONG_WORKER "
        "ZERO_COPY_SERIALIZATION PRE_ALLOC_SAMPLE_NUM CLIENT_ZMQ_IO_THREADS CONTROLLER_ZMQ_MAX_SOCKETS "
        "CLUSTER_IP RDMA_DEVICES RDMA_TRANSPORT NODE_ROOT NODE_SECONDS LOG_LEVEL"
    ).split()
)
"""What programs, tools and pods read, and what 0.1.x read."""
_ALIKE: Final = 0.85
"""Names less alike than this are variables of something else."""


def misspelt(environ: Mapping[str, str] | None = None) -> list[str]:
    """One text for each variable that looks like one of ``VARIABLES``, and is none."""
    given = os.environ if environ is None else environ
    unknown = sorted(name for name in given if name.upper().startswith("TQ_") and name not in VARIABLES)
    found = [(name, difflib.get_close_matches(name.upper(), VARIABLES, n=1, cutoff=_ALIKE)) for name in unknown]
    return [f"environment variable {name} is not read; did you mean {near[0]}?" for name, near in found if near]


def check_values(environ: Mapping[str, str] | None = None) -> None:
    """Raises ConfigError for a wrong value of ``TQ_EVENT_LOOP`` or ``TQ_LOGGING_LEVEL``."""
    given = os.environ if environ is None else environ
    event_loop(given)
    level = given.get("TQ_LOGGING_LEVEL") or "WARNING"
    if not isinstance(logging.getLevelName(level.upper()), int):
        raise ConfigError(
            f"environment variable TQ_LOGGING_LEVEL: {level!r} is not a level; use DEBUG, INFO, WARNING, ERROR or "
            "CRITICAL"
        )


def event_loop(environ: Mapping[str, str] | None = None) -> str:
    """The value of ``TQ_EVENT_LOOP``: ``uvloop`` (default) or ``asyncio``. Raises ConfigError."""
    text = (os.environ if environ is None else environ).get("TQ_EVENT_LOOP") or "uvloop"
    if text not in ("uvloop", "asyncio"):
        raise ConfigError(f"environment variable TQ_EVENT_LOOP: {text!r} is not an event loop; use uvloop or asyncio")
    return text
