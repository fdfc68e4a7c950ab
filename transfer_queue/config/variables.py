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
    {
        "TQ_CONFIG_FILE",
        "TQ_CONTROLLER_ADDRESS",
        "TQ_QUEUE_NAME",
        "TQ_QUEUE_UID",
        "TQ_INHERITED_FILE",
        "TQ_TLS_CA",
        "TQ_TLS_CERTIFICATE",
        "TQ_TLS_KEY",
        "TQ_TLS_SERVER_NAME",
        "TQ_TOKEN_FILE",
        "TQ_LAYOUT",
        "TQ_MISSING_FIELDS",
        "TQ_TRACES",
        "TQ_PUT_WAIT",
        "TQ_CONNECT_TIMEOUT",
        "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT",
        "TQ_CONTROLLER_GET_METADATA_TIMEOUT",
        "TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL",
        "TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL",
        "TQ_LOGGING_LEVEL",
        "TQ_NUM_THREADS",
        "TQ_EVENT_LOOP",
        "TQ_DEVICE_MEMORY",
        "TQ_RAY_CAPACITY",
        "TQ_MOONCAKE_ROLE",
        "TQ_MC_RPC_PORT",
        "TQ_MC_METADATA_SERVER_PORT",
        "TQ_YUANRONG_WORKER",
        "TQ_ZERO_COPY_SERIALIZATION",
        "TQ_PRE_ALLOC_SAMPLE_NUM",
        "TQ_CLIENT_ZMQ_IO_THREADS",
        "TQ_CONTROLLER_ZMQ_MAX_SOCKETS",
        "TQ_CLUSTER_IP",
        "TQ_RDMA_DEVICES",
        "TQ_RDMA_TRANSPORT",
        "TQ_NODE_ROOT",
        "TQ_NODE_SECONDS",
        "TQ_LOG_LEVEL",
    }
)
"""What programs, tools and pods read, and what 0.1.x read."""
_ALIKE: Final = 0.85
"""Names less alike than this are variables of something else."""


def misspelt(environ: Mapping[str, str] | None = None) -> list[str]:
    """One text for each variable that looks like one of ``VARIABLES``, and is none."""
    given = os.environ if environ is None else environ
    unknown = sorted(name for name in given if name.upper().startswith("TQ_") and name not in VARIABLES)
    found = [(name, _near(name.upper())) for name in unknown]
    return [
        f"environment variable {name} is not read; did you mean {' or '.join(near)}?" for name, near in found if near
    ]


def _near(name: str) -> list[str]:
    """The variables that ``name`` resembles, or whose first words it is."""
    longer = sorted(known for known in VARIABLES if known.startswith(f"{name}_"))
    return difflib.get_close_matches(name, VARIABLES, n=1, cutoff=_ALIKE) or longer[:3]


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
