"""Tensors between Ray's actors, tasks and drivers, without a queue: see :mod:`transfer_queue.ray.transport`.

Importing this imports Ray and torch.
"""

from transfer_queue.ray.transport import TRANSPORT, register_tensor_transport

__all__ = ["TRANSPORT", "register_tensor_transport"]
