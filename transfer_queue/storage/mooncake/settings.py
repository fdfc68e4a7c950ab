"""Settings of the Mooncake backend. The controller hands them to clients and storage units as they are."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import AfterValidator, Field, model_validator

from transfer_queue.config import defaults
from transfer_queue.config.document import Bytes, Document, validate_document
from transfer_queue.config.quantity import Quantity
from transfer_queue.errors import ConfigError
from transfer_queue.storage.mooncake.oplog import MasterLog

__all__ = ["MasterSettings", "MooncakeSettings", "Role", "ZeroCopy", "parse_settings", "role_from"]

Role = Literal["worker", "controller"]
"""Choice of the pair of buffer sizes of a process."""

GIB = 2**30
_DEFAULT_CLUSTER = "mooncake"
"""The engine's own."""
MAX_PART = 64 * 2**20
_WORKER_BUFFER = int(Quantity(defaults.ZERO_COPY_WORKER_BUFFER_SIZE))
_CONTROLLER_BUFFER = int(Quantity(defaults.ZERO_COPY_CONTROLLER_BUFFER_SIZE))
_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})")


def _in_gib(model: type[Document], values: Any) -> Any:
    """Accept ``<size>_gb: 2.0`` (GiB, the name upstream uses) for each field of bytes ``<size>``."""
    if not isinstance(values, dict):
        return values
    result = dict(values)
    for name, info in model.model_fields.items():
        spelled = f"{name}_gb"
        if not name.endswith("_size") or spelled not in result:
            continue
        if name in result or info.alias in result:
            raise ValueError(f"{name} and {spelled} are the same setting; give one of them")
        number = result.pop(spelled)
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ValueError(f"{spelled} is a number of GiB, got {number!r}")  # noqa: TRY004
        result[name] = int(number * GIB)
    return result


def _metadata_server(value: str) -> str:
    if value == "P2PHANDSHAKE" or re.fullmatch(r"https?://[^/\s]+/\S+", value):
        return value
    if value.startswith("etcd://"):
        for member in value.removeprefix("etcd://").split(";"):
            _host_port(member)
        return value
    if value.upper().replace("_", "").replace("-", "") == "P2PHANDSHAKE":
        raise ValueError("write it exactly P2PHANDSHAKE")
    raise ValueError("allowed: http://HOST:PORT/metadata, etcd://HOST:PORT or P2PHANDSHAKE")


def _host_port(value: str) -> str:
    match = _HOST_PORT.fullmatch(value)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ValueError("allowed: HOST:PORT")
    return value


def _master_address(value: str) -> str:
    if value.startswith("etcd://"):
        for member in value.removeprefix("etcd://").split(";"):
            _host_port(member)
        return value
    return _host_port(value)


def _masters(value: str) -> str:
    for member in value.split(";"):
        _host_port(member)
    return value


def _positive(value: int) -> int:
    if value < 2**20:
        raise ValueError("at least 1Mi")
    return value


BufferBytes = Annotated[Bytes, AfterValidator(_positive)]
Port = Annotated[int, Field(ge=0, le=65535)]


class ZeroCopy(Document):
    """Registered buffers that a process sends from and receives into. They grow up to tensor + bytes size on demand."""

    enable: bool = True
    """Off: bytes go through the engine's own local buffer, one copy more each way."""
    tensor_buffer_size: BufferBytes = _WORKER_BUFFER
    bytes_buffer_size: BufferBytes = _WORKER_BUFFER
    controller_tensor_buffer_size: BufferBytes = _CONTROLLER_BUFFER
    """The sizes of a process that handles whole batches, such as a driver: one with ``TQ_MOONCAKE_ROLE=controller``."""
    controller_bytes_buffer_size: BufferBytes = _CONTROLLER_BUFFER

    @model_validator(mode="before")
    @classmethod
    def _gib(cls, values: Any) -> Any:
        return _in_gib(cls, values)


class MooncakeSettings(Document):
    """Settings of clients and storage units for Mooncake. Sizes are in bytes, those of ``…_gb`` names in GiB."""

    metadata_server: Annotated[str, AfterValidator(_metadata_server)]
    """``http://HOST:PORT/metadata``, ``etcd://…`` or ``P2PHANDSHAKE``."""
    master_server_address: Annotated[str, AfterValidator(_master_address)]
    """``HOST:PORT``, or ``etcd://A:2379;B:2379`` for a master with high availability."""
    cluster_id: str | None = None
    """``--cluster_id`` of masters with high availability; default: what ``MC_STORE_CLUSTER_ID`` says."""
    admin_address: Annotated[str, AfterValidator(_masters)] | None = None
    """The master's HTTP port of metrics; default: the usual port of it on the master's host. With high availability
    those of all masters, ``A:9003;B:9003``. Storage units only."""
    protocol: Literal["rdma", "tcp"] = "rdma"
    device_name: str = defaults.MOONCAKE_DEVICE_NAME
    """``auto``: those nearest to the GPUs of the process; or a comma-separated list. Without meaning for tcp."""
    global_segment_size: BufferBytes = int(Quantity(defaults.MOONCAKE_GLOBAL_SEGMENT_SIZE))
    """Accepted and without effect: the capacity of each storage unit is the segment that it contributes."""
    local_buffer_size: BufferBytes = int(Quantity(defaults.MOONCAKE_LOCAL_BUFFER_SIZE))
    """The engine's buffer in each client; used, and allocated, only without ``zero_copy.enable``."""
    zero_copy: ZeroCopy = ZeroCopy()
    eviction_disabled: bool = False
    """The master runs with eviction_high_watermark_ratio=1 and eviction_ratio=0. Otherwise blocks are hard-pinned."""
    start_timeout: float = Field(default=60.0, ge=0)
    """Seconds to keep trying to reach the master when a process starts."""
    call_timeout: float = Field(default=35.0, gt=0)
    """Seconds after which one stuck engine call is given up. The engine itself waits 30 for a silent master."""

    @model_validator(mode="before")
    @classmethod
    def _gib(cls, values: Any) -> Any:
        return _in_gib(cls, values)

    def buffer_bytes_of(self, role: Role) -> int:
        """Limit of the memory that a client of this role moves blocks through."""
        if not self.zero_copy.enable:
            return self.local_buffer_size
        if role == "controller":
            return self.zero_copy.controller_tensor_buffer_size + self.zero_copy.controller_bytes_buffer_size
        return self.zero_copy.tensor_buffer_size + self.zero_copy.bytes_buffer_size

    def master_log(self) -> MasterLog | None:
        """The log of several masters; None for one."""
        if not self.master_server_address.startswith("etcd://"):
            return None
        cluster = self.cluster_id or os.environ.get("MC_STORE_CLUSTER_ID") or _DEFAULT_CLUSTER
        return MasterLog(self.master_server_address, cluster)

    @property
    def part_bytes(self) -> int:
        """Longer blocks are stored in parts of this size. All processes of a queue must agree on it."""
        return min(MAX_PART, *(self.buffer_bytes_of(role) // 4 for role in get_args(Role)))


def role_from(environment: Mapping[str, str]) -> Role:
    """Return the buffer sizes of this process. Raises ConfigError."""
    role = environment.get("TQ_MOONCAKE_ROLE") or "worker"
    if role not in get_args(Role):
        raise ConfigError(f"environment variable TQ_MOONCAKE_ROLE: {role!r}; allowed: {', '.join(get_args(Role))}")
    return cast("Role", role)


class MasterSettings(Document):
    """A ``mooncake_master`` to be started on this host. Port 0: any free port."""

    host: str = "127.0.0.1"
    """Address to serve on, and the one that others get."""
    rpc_interface: str | None = None
    """Network interface whose IPv4 address replaces ``host``."""
    rpc_port: Port = defaults.MASTER_RPC_PORT
    http_metadata_port: Port | None = defaults.MASTER_HTTP_METADATA_PORT
    """None: no metadata server, which would listen on all addresses regardless of ``host``; engines ask each other."""
    metrics_port: Port = defaults.MASTER_METRICS_PORT
    lease_ttl_ms: int = Field(default=5000, ge=100)
    """A read that takes longer than this is repeated."""
    client_ttl: int = Field(default=10, ge=1)
    """Seconds without a heartbeat after which a storage unit's segment is unmounted."""
    start_timeout: float = Field(default=20.0, gt=0)

    @model_validator(mode="after")
    def _distinct(self) -> MasterSettings:
        ports = [port for port in (self.rpc_port, self.http_metadata_port, self.metrics_port) if port]
        if len(set(ports)) < len(ports):
            raise ValueError("rpcPort, httpMetadataPort and metricsPort must differ")
        return self


def parse_settings(values: dict[str, Any]) -> MooncakeSettings:
    """Check the settings as they came from the controller. Raises ConfigError that names the field."""
    return validate_document(MooncakeSettings, values, "backend mooncake")
