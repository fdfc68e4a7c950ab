"""The four checkpoint calls of a client of 0.1.9: refused, by what to call instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from transfer_queue.errors import UnsupportedRequestError

if TYPE_CHECKING:
    import os

__all__ = ["AsyncCheckpointCalls", "CheckpointCalls"]


def _refuse(call: str, instead: str) -> NoReturn:
    raise UnsupportedRequestError(
        f"{call} is not available: metadata and data that are written one after the other do not fit each other while "
        f"producers run; call transfer_queue.{instead}, which takes both at one moment"
    )


class AsyncCheckpointCalls:
    """Each raises UnsupportedRequestError, which is a RuntimeError and a NotImplementedError."""

    async def async_save_controller_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Refused: use ``transfer_queue.save_checkpoint``. Raises UnsupportedRequestError."""
        _refuse("save_controller_checkpoint", "save_checkpoint")

    async def async_load_controller_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Refused: use ``transfer_queue.load_checkpoint``. Raises UnsupportedRequestError."""
        _refuse("load_controller_checkpoint", "load_checkpoint")

    async def async_save_storage_checkpoint(self, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Refused: use ``transfer_queue.save_checkpoint``. Raises UnsupportedRequestError."""
        _refuse("save_storage_checkpoint", "save_checkpoint")

    async def async_load_storage_checkpoint(self, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Refused: use ``transfer_queue.load_checkpoint``. Raises UnsupportedRequestError."""
        _refuse("load_storage_checkpoint", "load_checkpoint")


class CheckpointCalls:
    """The blocking twins."""

    def save_controller_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """See ``async_save_controller_checkpoint``."""
        _refuse("save_controller_checkpoint", "save_checkpoint")

    def load_controller_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """See ``async_load_controller_checkpoint``."""
        _refuse("load_controller_checkpoint", "load_checkpoint")

    def save_storage_checkpoint(self, checkpoint_dir: str | os.PathLike[str]) -> None:
        """See ``async_save_storage_checkpoint``."""
        _refuse("save_storage_checkpoint", "save_checkpoint")

    def load_storage_checkpoint(self, checkpoint_dir: str | os.PathLike[str]) -> None:
        """See ``async_load_storage_checkpoint``."""
        _refuse("load_storage_checkpoint", "load_checkpoint")
