"""Options of a read: where its tensors are allocated, and their layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from transfer_queue.client.arguments import check_flag
from transfer_queue.client.options import ClientOptions
from transfer_queue.errors import InvalidInputError, InvalidTypeError

if TYPE_CHECKING:
    import torch

    from transfer_queue.columns.decoding import Layout

__all__ = ["DEFAULT_READ", "CheckedReadOptions", "ReadOptions"]


@dataclass(frozen=True)
class CheckedReadOptions:
    """Options of a read, checked against each other and the client's options."""

    layout: Layout
    allow_pickle: bool
    zero_copy: bool = False
    out: Any = None
    device: torch.device | None = None
    """None: the CPU."""
    streams: tuple[torch.cuda.Stream, ...] = ()
    """The caller's streams on the CUDA devices that rows are copied to."""


class ReadOptions(NamedTuple):
    """Arguments of a read; see ``transfer_queue.kv_batch_get``."""

    zero_copy: bool = False
    out: Any = None
    device: Any = None
    layout: Any = None

    def checked(self, options: ClientOptions) -> CheckedReadOptions:
        """Check the arguments against each other. Raises InvalidInputError, InvalidTypeError."""
        zero_copy, out, device, layout = self
        if layout is not None:
            if not isinstance(layout, str):
                raise InvalidTypeError(f"layout must be 'jagged' or 'dense', not {type(layout).__name__}")
            if layout not in ("jagged", "dense"):
                raise InvalidInputError(f"layout must be 'jagged' or 'dense', not {layout!r}")
            if out is not None:
                raise InvalidInputError("the tensors of out determine the layout; do not pass layout as well")
            options = replace(options, layout="dense" if layout == "dense" else "jagged")
        if not check_flag("zero_copy", zero_copy) and out is None and device is None:
            return CheckedReadOptions(options.layout, options.unpickle)
        import torch
        from tensordict import TensorDictBase

        from transfer_queue.columns.device import checked_device, streams_of

        if out is not None and not isinstance(out, Mapping | TensorDictBase):
            raise InvalidTypeError(
                f"out must be a TensorDict or a mapping of fields to tensors, not {type(out).__name__}"
            )
        if zero_copy and out is not None:
            raise InvalidInputError("zero_copy returns views of stored rows and out copies them; pass one of the two")
        if out is not None and device is not None:
            raise InvalidInputError("the tensors of out determine the device; do not pass device as well")
        found = None if device is None else checked_device(device)
        if found is None or found.type == "cpu":
            streams = () if out is None else streams_of(out.values())
            return CheckedReadOptions(options.layout, options.unpickle, zero_copy, out, streams=streams)
        if zero_copy:
            raise InvalidInputError(f"zero_copy returns views of this host's memory, which are not on {found}")
        streams = (torch.cuda.current_stream(found),)
        return CheckedReadOptions(options.layout, options.unpickle, device=found, streams=streams)


DEFAULT_READ = ReadOptions()
