"""``_tensor_transport="transferqueue"``: tensors of Ray's objects as blocks in shared memory.

A one-sided transport of Ray Direct Transport (https://docs.ray.io/en/latest/ray-core/direct-transport.html): the
tensors of an object become one block of the process that puts them, and a reader takes it from there, through shared
memory on the same host and over TCP from another. Both may be any driver, task or actor, and need no collective group.

Importing this module registers the transport, and a reference that arrives in a process imports it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
import torch
from ray.experimental import TensorTransportManager, TensorTransportMetadata
from ray.experimental import register_tensor_transport as _register
from ray.experimental.rdt.tensor_transport_manager import CommunicatorMetadata

from transfer_queue.columns.device import checked_device, complete_on, pin
from transfer_queue.columns.tensor_bytes import check_storable, dtype_name
from transfer_queue.columns.tensors import Piece, decode, decode_into, encode
from transfer_queue.errors import (
    CapacityError,
    ConnectionLostError,
    InvalidInputError,
    NotAuthorizedError,
    StorageKeyNotFoundError,
)
from transfer_queue.ray.exchange import CAPACITY_VARIABLE, Exchange, Place
from transfer_queue.storage.base import Fetched
from transfer_queue.storage.ray.transports import may_put

__all__ = ["TRANSPORT", "TransferQueueTransport", "exchange", "register_tensor_transport"]

TRANSPORT: Final = "transferqueue"
"""Name of the transport, in capital or small letters."""

_exchange: Exchange | None = None
_exchange_lock = threading.Lock()


def exchange() -> Exchange:
    """What this process put for others and reads of them, made on first use."""
    global _exchange
    with _exchange_lock:
        if _exchange is None or not _exchange.alive:
            _exchange = Exchange(ray.util.get_node_ip_address())
        return _exchange


@dataclass
class BlockMetadata(TensorTransportMetadata):  # type: ignore[misc] # Ray types nothing
    """What a reader is told of the tensors of one object."""

    place: Place | None = None
    """None: there are no tensors."""


class TransferQueueTransport(TensorTransportManager):  # type: ignore[misc]
    """See ``TensorTransportManager``; one object of it serves a process."""

    def __init__(self) -> None:
        self._held: dict[str, BlockMetadata] = {}
        self._lock = threading.Lock()

    def tensor_transport_backend(self) -> str:
        return TRANSPORT.upper()

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[torch.Tensor]) -> BlockMetadata:
        """Copy the tensors into a block. Raises InvalidInputError, CapacityError."""
        with self._lock:
            held = self._held.get(obj_id)
        if held is not None:  # the task was tried again
            return held
        _check_actor()
        meta = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
        if not rdt_object:
            return BlockMetadata(meta)
        devices = {tensor.device.type for tensor in rdt_object}
        if len(devices) > 1:
            raise InvalidInputError(
                f"the tensors of one object lie on {' and '.join(sorted(devices))}; put one object for each device"
            )
        for number, tensor in enumerate(rdt_object):
            check_storable(tensor, f"tensor {number} of the object")
            dtype_name(tensor.dtype, f"tensor {number} of the object")
        block = encode({str(number): tensor.unsqueeze(0) for number, tensor in enumerate(rdt_object)}, rows=1)
        try:
            place = exchange().put(block)
        except CapacityError as error:
            raise CapacityError(
                f"no room for {block.nbytes} bytes of tensors in the memory of this process for the transport "
                f"{TRANSPORT}; drop references to earlier objects, or set {CAPACITY_VARIABLE} to more before the "
                f"process starts: {error}"
            ) from None
        held = BlockMetadata(meta, devices.pop(), place)
        with self._lock:
            self._held[obj_id] = held
        return held

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """The tensors, new ones or ``target_buffers``, on the device that they were put from, or on theirs.

        Raises ConnectionLostError, StorageKeyNotFoundError.
        """
        assert isinstance(tensor_transport_metadata, BlockMetadata)
        place = tensor_transport_metadata.place
        if place is None:
            return []
        try:
            fetched = exchange().get(place)
        except (ConnectionLostError, NotAuthorizedError) as error:  # another process listens there now
            raise ConnectionLostError(
                f"the tensors of object {obj_id} are gone or out of reach: the process that put them has ended, or "
                f"its address {place.address} cannot be reached from here; put them from a process that lives as long "
                f"as they are read: {error}"
            ) from None
        except StorageKeyNotFoundError:
            raise StorageKeyNotFoundError(
                f"the tensors of object {obj_id} were freed by Ray: no reference to it was left in its owner; keep the "
                "ObjectRef until the tensors are read"
            ) from None
        try:
            return _received(fetched, tensor_transport_metadata, target_buffers)
        finally:
            fetched.release()

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        raise NotImplementedError(f"{TRANSPORT} is one-sided: readers take the tensors by themselves")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: Any) -> None:
        with self._lock:
            held = self._held.pop(obj_id, None)
        if held is not None and held.place is not None:
            exchange().free(held.place.block)

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """A read ends by itself: nobody waits for it."""


def _check_actor() -> None:
    """Raises InvalidInputError in an actor that Ray cannot tell to free what it put."""
    if not may_put(TRANSPORT):
        raise InvalidInputError(
            "this actor cannot put tensors by a tensor transport, as Ray could not have it free them; define it with "
            "@ray.remote(enable_tensor_transport=True)"
        )


def _received(fetched: Fetched, metadata: BlockMetadata, targets: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
    view = fetched.blocks[0].view
    names = [schema.name for schema in view.fields]
    pieces = {name: [Piece(view, None, None)] for name in names}
    device = checked_device("cuda") if metadata.tensor_device == "cuda" and not targets else None
    streams = [torch.cuda.current_stream(device)] if device is not None else []
    if targets:
        streams += [torch.cuda.current_stream(target.device) for target in targets if target.is_cuda]
    if streams:
        pin(view.memory)
    with complete_on(streams):
        if targets:
            out = {name: target.unsqueeze(0) for name, target in zip(names, targets, strict=True)}
            decode_into(pieces, 1, view.fields, out, allow_pickle=False)
            return list(targets)
        copy = device is None and not fetched.is_own
        batch = decode(pieces, 1, view.fields, layout="dense", copy=copy, allow_pickle=False, device=device)
    return [batch[name][0] for name in names]


def register_tensor_transport() -> None:
    """Make ``transferqueue`` known to Ray in this process, and in the actors that it creates. Idempotent.

    Call it before actors with ``@ray.method(tensor_transport="transferqueue")`` are defined, and in tasks that put.

    Example:
        >>> register_tensor_transport()
        >>> reference = ray.put({"weights": tensor}, _tensor_transport="transferqueue")
        >>> ray.get(reader.use.remote([reference]))  # reader calls ray.get(reference)
    """
    from ray.experimental.rdt.util import transport_manager_info

    if TRANSPORT.upper() not in transport_manager_info:
        _register(TRANSPORT, ["cpu", "cuda"], TransferQueueTransport, torch.Tensor)


register_tensor_transport()
