"""Settings of the server processes: ``python -m transfer_queue.runtime.controller|storage_unit --config FILE``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from transfer_queue.config import defaults
from transfer_queue.config.attach import AttachConfig
from transfer_queue.config.document import Bytes, Document
from transfer_queue.config.quantity import Quantity
from transfer_queue.config.security import ServerSecurity

__all__ = [
    "SMALLEST_CAPACITY",
    "BackendChoice",
    "CheckpointConfig",
    "ControllerConfig",
    "Durability",
    "SamplerChoice",
    "StorageUnitConfig",
    "Timing",
]

SMALLEST_CAPACITY = 2**20
"""Bytes of a storage unit."""


class SamplerChoice(Document):
    """``name``: a built-in sampler's class name, or ``package.module:Class`` importable by the controller."""

    name: str = "SequentialSampler"
    args: dict[str, Any] = Field(default_factory=dict)
    pickled: str | None = None
    """Base64 of the pickled class or instance, if no module that can be imported has it; ``name`` then only tells what
    it is. The controller runs the code that these settings name, as with ``name``."""


class BackendChoice(Document):
    """``kind``: a name of storage/registry.py. ``settings`` reach the backend's client and unit side as they are."""

    kind: str = "simple"
    settings: dict[str, Any] = Field(default_factory=dict)


Durability = Literal["none", "process", "node"]
"""Failures that an acknowledged change survives: none; the end of any process; the end of the machine."""


class Timing(Document):
    """Seconds. A peer that is silent for ``peer_timeout`` counts as dead; pings are sent every ``heartbeat``."""

    heartbeat: float = Field(default=2.0, gt=0)
    peer_timeout: float = Field(default=10.0, gt=0)
    reconnect_grace: float = Field(default=5.0, ge=0)
    """Time that a client or storage unit has to reconnect after it lost its connection."""


class ControllerConfig(Document):
    """Settings of a controller process."""

    name: str = "default"
    """Name of the queue."""
    uid: str | None = None
    """Identity of the queue, the same after every restart. Clients refuse a queue with another identity."""
    allow_pickle: bool | None = None
    """Default for clients without a setting of their own; see ``AttachSecurity``. Servers never unpickle."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=defaults.CONTROLLER_PORT, ge=0, le=65535)
    """0: any free port (see the READY line)."""
    advertise_host: str | None = None
    """Host name that others reach this process by; default: ``host``, or this host's name if that is a wildcard."""
    metrics_port: int | None = Field(default=defaults.CONTROLLER_METRICS_PORT, ge=0, le=65535)
    """HTTP port of /metrics, /healthz, /readyz; 0: any free port; null: off."""
    sampler: SamplerChoice = SamplerChoice()
    polling_mode: bool = False
    sample_capacity: int | None = Field(default=None, ge=1)
    """Rows over all partitions; null: unlimited."""
    lease_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Seconds in which fetched rows are to be acknowledged before they are delivered again; 0: rows are delivered at
    most once. A fetch may say otherwise."""
    backend: BackendChoice = BackendChoice()
    expected_units: int = Field(default=0, ge=0)
    """/readyz answers 200 once this many storage units are registered."""
    shards: list[str] = Field(default_factory=list, max_length=defaults.MOST_SHARDS)
    """host:port of every controller of this queue, where several share its partitions; empty: there is only this."""
    shard: int = Field(default=0, ge=0)
    """Index of this one in ``shards``, from 0."""
    timing: Timing = Timing()
    durability: Durability = "none"
    journal: str | None = None
    """Folder of the journal; needed unless ``durability`` is none. For node it has to outlive the machine."""
    security: ServerSecurity = ServerSecurity()


class StorageUnitConfig(Document):
    """Settings of a storage unit process."""

    name: str = "unit-0"
    """Unique among the units of a queue; a unit that comes back under the same name replaces its predecessor."""
    host: str = "127.0.0.1"
    port: int = Field(default=defaults.STORAGE_PORT, ge=0, le=65535)
    advertise_host: str | None = None
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    controller: list[str] = Field(min_length=1)
    """host:port of the controller(s)."""
    shards: list[str] = Field(default_factory=list, max_length=defaults.MOST_SHARDS)
    """host:port of every controller, in order, where several share the queue's partitions: the unit serves them all.
    Empty: there is one controller, at ``controller``."""
    start_timeout: float = Field(default=30.0, ge=0)
    """Seconds to keep trying to reach the controller before giving up at start; later losses are retried for ever."""
    backend: BackendChoice = BackendChoice()
    capacity: Bytes = Field(default=int(Quantity(defaults.STORAGE_CAPACITY)), ge=SMALLEST_CAPACITY)
    """Bytes of the arena or segment."""
    memory_share: float = Field(default=0, ge=0, le=1)
    """Unless 0, the arena has this share of the free memory at the start, if it is more than ``capacity``. Pages beyond
    ``capacity`` are allocated as rows need them."""
    directory: str = "/dev/shm"
    """Folder of the arena's file: a tmpfs that clients on the same host share."""
    durability: Durability = "none"
    """Unless none, the arena is kept in ``directory``, which is this queue's alone, and taken up again at a start. For
    node the directory has to outlive the machine."""
    prefault: bool = True
    """Touch the arena's pages in the background after start."""
    reserve: bool = False
    """Allocate the arena's disk space at the start, so that no write meets a full disk. For a ``directory`` on disk."""
    timing: Timing = Timing()
    security: ServerSecurity = ServerSecurity()
    """The same policy and tokens as the controller's."""


class CheckpointConfig(Document):
    """Settings of the process that restores a queue and saves it on a schedule."""

    attach: AttachConfig
    """How it reaches the queue. With a policy it needs the role admin for all partitions."""
    restore_from: str | None = None
    """Checkpoint, or series of them, that is loaded before anything is saved, unless the queue has rows."""
    units: int = Field(default=0, ge=0)
    """Storage units that a restore waits for."""
    schedule: str | None = None
    """See ``config/schedule.py``; null: no saves."""
    destination: str | None = None
    """Where the checkpoints go; null: no saves."""
    keep: int = Field(default=defaults.KEPT_CHECKPOINTS, ge=1)
    status_file: str
    """File of its CheckpointReport, which a restarted process continues."""
    host: str = "127.0.0.1"
    """Address of ``metrics_port``."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """HTTP port of /status, /healthz, /readyz; 0: any free port; null: off."""
