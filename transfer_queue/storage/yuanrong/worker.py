"""A connection to a data system worker. Everything here blocks; callers bring the thread."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from transfer_queue.columns.block import EncodedBlock
from transfer_queue.config.attach import parse_address
from transfer_queue.config.document import Document, validate_document
from transfer_queue.errors import (
    CapacityError,
    ConfigError,
    ConnectionLostError,
    StartError,
    StorageKeyNotFoundError,
)

__all__ = ["Worker", "YuanrongSettings", "block_key", "open_worker", "parse_settings"]

_KEYS_AT_ONCE = 1000
"""The data system takes less than 2000 in one call."""


def _address(value: str) -> str:
    try:
        parse_address(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return value


class YuanrongSettings(Document):
    """Settings of the backend."""

    worker: Annotated[str, AfterValidator(_address)] = "127.0.0.1:31501"
    """HOST:PORT of the worker that keeps a storage unit's blocks, as all clients reach it. ``TQ_YUANRONG_WORKER`` in a
    unit's environment wins: on a cluster each node has a worker of its own."""
    request_timeout: float = Field(default=20.0, gt=0)
    """Seconds that one call of the data system may take."""


def parse_settings(values: Mapping[str, Any]) -> YuanrongSettings:
    """Raises ConfigError that names the field."""
    known = {name: value for name, value in values.items() if name != "prefault"}  # the memory backend's own
    if os.environ.get("TQ_YUANRONG_WORKER"):
        known["worker"] = os.environ["TQ_YUANRONG_WORKER"]
    return validate_document(YuanrongSettings, known, "backend yuanrong")


def block_key(prefix: str, block: int) -> str:
    return f"{prefix}:{block}"


class Worker:
    """Made by ``open_worker``. Errors are those of the backend protocol and name the keys."""

    def __init__(self, client: Any, address: str) -> None:
        self._client = client
        self._address = address

    def write(self, key: str, block: EncodedBlock) -> None:
        """Store a block: one copy, straight into the worker's shared memory where that is on this host."""
        with self._named_errors([key]):
            buffers = self._client.mcreate([key], [block.nbytes])
            block.write_into(memoryview(buffers[0].MutableData()).cast("B"))
            self._client.mset_buffer(buffers)

    def read(self, keys: Sequence[str]) -> list[Any]:
        """A buffer for each key; ``immutable_data()`` of it is valid as long as the buffer is held."""
        found: list[Any] = []
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            some = list(keys[start : start + _KEYS_AT_ONCE])
            with self._named_errors(some):
                found += self._client.get_read_only_buffers(some)
        gone = [key for key, buffer in zip(keys, found, strict=True) if buffer is None]
        if gone:
            raise StorageKeyNotFoundError(f"blocks are gone from the worker at {self._address}: {', '.join(gone[:8])}")
        return found

    def put(self, key: str, value: bytes) -> None:
        with self._named_errors([key]):
            self._client.set(key, value)

    def exists(self, key: str) -> bool:
        with self._named_errors([key]):
            return bool(self._client.exist([key])[0])

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys; those that are gone already do not matter."""
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            some = list(keys[start : start + _KEYS_AT_ONCE])
            with self._named_errors(some):
                self._client.delete(some)

    @contextmanager
    def _named_errors(self, keys: Sequence[str]) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the only type that the data system raises
            text = " ".join(str(error).split())
            if "Key not found" in text:
                raise StorageKeyNotFoundError(
                    f"blocks are gone from the worker at {self._address}: {', '.join(keys[:8])}"
                ) from error
            if "Out of memory" in text:
                raise CapacityError(
                    f"no capacity left in the worker at {self._address}: its shared memory must hold what its storage "
                    "units may hold together; raise --shared_memory_size_mb"
                ) from error
            raise ConnectionLostError(f"the data system worker at {self._address} does not serve: {text}") from error


def open_worker(address: str, settings: YuanrongSettings) -> Worker:
    """Raises StartError: not installed, not reachable."""
    try:
        module = importlib.import_module("yr.datasystem")
    except ModuleNotFoundError:
        raise StartError("openYuanrong is not installed: pip install 'TransferQueue[yuanrong]'") from None
    except ImportError as error:
        raise StartError(f"openYuanrong does not load: {' '.join(str(error).split())}") from error
    host, port = parse_address(address)
    timeout_ms = int(1000 * settings.request_timeout)
    client = module.KVClient(host=host, port=port, connect_timeout_ms=timeout_ms, req_timeout_ms=timeout_ms)
    try:
        client.init()
    except RuntimeError as error:
        raise StartError(
            f"the data system worker at {address} cannot be reached ({' '.join(str(error).split())}): start it with "
            "dscli start, or check the setting worker"
        ) from error
    return Worker(client, address)
