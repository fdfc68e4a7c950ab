"""torch tensors as bytes and back. The only place that knows how a tensor's memory looks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, cast

import numpy as np
import torch

from transfer_queue.columns.column import ITEM_BYTES, Bytes
from transfer_queue.errors import InvalidInputError

__all__ = ["DTYPES", "check_storable", "dtype_name", "tensor_from_bytes", "tensor_to_bytes"]

DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}
"""The element types that this torch has, by name."""

_OF_NUMPY: Final = frozenset(getattr(torch, name) for name in DTYPES if hasattr(np, name))
"""Those that numpy has as well."""

_NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """The name to store ``dtype`` under. Raises InvalidInputError, naming ``where``, for types that are not stored."""
    name = _NAMES.get(dtype)
    if name is None:
        raise InvalidInputError(f"{where}: dtype {dtype} cannot be stored; convert it to one of {', '.join(DTYPES)}")
    return name


_INSTEAD: Final = {
    "DTensor": "put .to_local(), the part of this rank, or .full_tensor()",
    "FakeTensor": "it has no data; call put outside of FakeTensorMode and of traced code",
    "AsyncCollectiveTensor": "put .wait()",
    "MaskedTensor": "put .to_tensor(value), and the mask as a field of its own",
}
_is_transformed: Final[Any] = cast(Any, torch._C)._functorch.is_functorch_wrapped_tensor
_plain_dispatch: Final[Any] = torch.Tensor.__torch_dispatch__


def check_storable(tensor: torch.Tensor, where: str) -> None:
    """Raises InvalidInputError, naming ``where``, the kind and the fix, for a tensor without strided elements in
    memory: sparse and mkldnn layouts, meta tensors, and subclasses with their own dispatch."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise InvalidInputError(f"{where}: {tensor.layout} tensors cannot be stored; use .to_dense()")
    kind = type(tensor)
    if kind.__torch_dispatch__ is not _plain_dispatch:
        instead = _INSTEAD.get(kind.__name__, "put a plain torch.Tensor made of it")
        raise InvalidInputError(f"{where}: a {kind.__name__} cannot be stored; {instead}")
    if tensor.device.type == "meta":
        raise InvalidInputError(f"{where}: a meta tensor has no data to store")
    if _is_transformed(tensor):
        raise InvalidInputError(
            f"{where}: a tensor within torch.vmap or torch.func has no data; call put outside of it"
        )


def tensor_to_bytes(tensor: torch.Tensor, where: str) -> Bytes:
    """The elements of a strided tensor in row-major order, as a flat uint8 array.

    Shares memory with a contiguous CPU tensor; otherwise copies once. Raises InvalidInputError like
    `check_storable`.
    """
    check_storable(tensor, where)
    if tensor.dtype in _OF_NUMPY and tensor.device.type == "cpu" and tensor.is_contiguous():
        # One call of torch instead of eight, each of which gives the GIL away and has to win it back.
        with suppress(RuntimeError):  # it requires grad, or is to be read as conjugated or negated
            own: Bytes = tensor.numpy().reshape(-1).view(np.uint8)
            return own
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    array: Bytes = flat.view(torch.uint8).numpy()
    return array


def tensor_from_bytes(data: Bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The tensor whose elements are ``data``: a view of it where its memory is writable and aligned, else a copy.

    Raises ValueError if ``data`` is not exactly as long as ``shape`` asks for.
    """
    if not data.flags.writeable or data.__array_interface__["data"][0] % dtype.itemsize:
        data = data.copy()
    count = data.nbytes // dtype.itemsize
    if count * dtype.itemsize != data.nbytes:
        raise ValueError(f"{data.nbytes} bytes are not a whole number of {dtype} elements")
    flat = torch.frombuffer(data, dtype=dtype) if count else torch.empty(0, dtype=dtype, device="cpu")
    expected = 1
    for size in shape:
        expected *= size
    if expected != count or any(size < 0 for size in shape):
        raise ValueError(f"{count} elements do not make a tensor of shape {tuple(shape)}")
    return flat if len(shape) == 1 else flat.view(tuple(shape))
