"""Micro-batches for a trainer while producers still write: a torch dataset and loader over a queue.

Names are imported on first use, so that importing this loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transfer_queue.dataloader.batches import chunk_batch_fn, default_fetch_batch_fn
    from transfer_queue.dataloader.end_marker import clear_end, mark_end
    from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
    from transfer_queue.dataloader.streaming_dataset import StreamingDataset

__all__ = [
    "StreamingDataLoader",
    "StreamingDataset",
    "chunk_batch_fn",
    "clear_end",
    "default_fetch_batch_fn",
    "mark_end",
]

_HOME_OF = {
    "StreamingDataLoader": "streaming_dataloader",
    "StreamingDataset": "streaming_dataset",
    "chunk_batch_fn": "batches",
    "clear_end": "end_marker",
    "default_fetch_batch_fn": "batches",
    "mark_end": "end_marker",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
