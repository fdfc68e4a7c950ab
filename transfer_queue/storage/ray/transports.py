"""The ways in which Ray moves a block to a reader, and whether they work in this process."""

from __future__ import annotations

import importlib
from typing import Any, Literal, TypeAlias

import numpy as np
import ray

from transfer_queue.columns.column import Bytes
from transfer_queue.errors import ConfigError

__all__ = ["Transport", "may_put", "put_value", "ready", "value_of"]

Transport: TypeAlias = Literal["object_store", "transferqueue", "nixl", "cuda_ipc"]
_OURS = "transfer_queue.ray"
"""Registers itself. Named, as it is made of clients and servers, which lie above the backends."""


def ready(transport: Transport) -> None:
    """Make a transport known to Ray in this process. Raises ConfigError that says why it does not work here."""
    where = f"backend ray: transport {transport}"
    if transport == "object_store":
        return
    try:
        importlib.import_module("ray.experimental.rdt")
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise ConfigError(f"{where} needs Ray 2.60 or newer, and torch ({error}); use object_store") from None
    if transport == "transferqueue":
        importlib.import_module(_OURS)
    elif transport == "nixl":
        try:
            importlib.import_module("nixl._api")
        except ImportError as error:
            raise ConfigError(
                f"{where}: the package nixl does not load here ({error}); pip install nixl, or use transferqueue"
            ) from None
    elif not torch.cuda.is_available():
        raise ConfigError(f"{where}: torch finds no CUDA device here; use transferqueue or object_store")
    else:
        raise ConfigError(
            f"{where}: Ray serves with it only processes to which it assigned the GPU of the block's owner, and blocks "
            "are owned by an actor without one; use the backend simple and put with placement='device'"
        )


def put_value(value: Bytes, transport: Transport) -> Any:
    """Bytes as an object that this process owns. Blocks."""
    if transport == "object_store":
        return ray.put(value)
    torch: Any = importlib.import_module("torch")
    tensor = torch.from_numpy(value)
    reference = ray.put(tensor, _tensor_transport=transport)
    if transport == "transferqueue":
        tensor.data = torch.empty(0, dtype=torch.uint8)  # Ray keeps the tensor, and the transport has a copy
    return reference


def value_of(reference: Any, timeout_s: float) -> Bytes:
    """What `put_value` put, from any process. Blocks."""
    value = ray.get(reference, timeout=timeout_s)
    return value if isinstance(value, np.ndarray) else np.asarray(value)


def may_put(transport: Transport) -> bool:
    """Whether Ray can have this process free what it puts: an actor has to be defined for it."""
    if transport == "object_store":
        return False
    try:
        actor = ray.get_runtime_context().current_actor
    except RuntimeError:  # a driver or a task
        return True
    return actor is None or bool(actor._ray_enable_tensor_transport)
