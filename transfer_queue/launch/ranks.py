"""One queue for the ranks of a ``torchrun`` job on one machine: rank 0 starts it, the others find it by a store.

The store holds the name of a file and no secret. The file must belong to this user and be private, so that others who
can write to the store cannot make ranks attach to another queue.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from transfer_queue.config.attach import AttachConfig
from transfer_queue.config.document import load_document
from transfer_queue.errors import StartError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Ranks"]

log = logging.getLogger(__name__)

_SILENCE_S = 5.0
_WAIT_S = 300.0


class Ranks:
    """The job that this process is a rank of."""

    def __init__(self, rank: int, environ: Mapping[str, str]) -> None:
        self.rank = rank
        self._environ = environ
        life = f"{environ.get('TORCHELASTIC_RUN_ID', '')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._key = f"transfer_queue/{life}"
        self._store: Store | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Ranks | None:
        """None if ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` do not name a job of several ranks."""
        rank, size, port = (environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if not (rank.isdigit() and size.isdigit() and port.isdigit() and environ.get("MASTER_ADDR")):
            return None
        return cls(int(rank), environ) if int(size) > 1 else None

    def publish(self, attach_file: str) -> None:
        """Publish the queue of this rank to the other ranks. Raises StartError if the job has no store."""
        self._open().set(self._key, json.dumps({"host": socket.gethostname(), "file": attach_file}))

    def withdraw(self) -> None:
        """Remove the entry of a queue that ends. Idempotent."""
        store, self._store = self._store, None
        if store is not None:
            with suppress(RuntimeError):  # the store may have ended before
                store.delete_key(self._key)

    def find(self) -> tuple[AttachConfig, str]:
        """Wait for the queue that rank 0 starts; return it and its file. Raises StartError if there is none in time."""
        store = self._open()
        waited = 0.0
        for slice_s in (_SILENCE_S, _WAIT_S - _SILENCE_S):
            try:
                store.wait([self._key], timedelta(seconds=slice_s))
                break
            except RuntimeError:
                waited += slice_s
                if waited < _WAIT_S:
                    log.warning("rank %d waits up to %g s for rank 0 to call init()", self.rank, _WAIT_S)
        else:
            raise StartError(
                f"rank {self.rank} found no queue, and rank 0 started none within {_WAIT_S:g} s: call "
                "transfer_queue.init() in rank 0 too, or set TQ_CONFIG_FILE or TQ_CONTROLLER_ADDRESS in all ranks"
            )
        told = json.loads(store.get(self._key))
        file = os.path.realpath(str(told["file"]))  # no link on the way can be changed after the check
        return _read(file, str(told["host"])), file

    def _open(self) -> Store:
        import torch.distributed as dist

        if self._store is not None:
            return self._store
        if dist.is_available() and dist.is_initialized():
            self._store = dist.distributed_c10d._get_default_store()
            return self._store
        agent = self._environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        where: dict[str, Any] = {
            "host_name": self._environ["MASTER_ADDR"],
            "port": int(self._environ["MASTER_PORT"]),
            "timeout": timedelta(seconds=_WAIT_S),
            "wait_for_workers": False,
            "multi_tenant": True,  # init_process_group opens the same store later
        }
        try:
            self._store = dist.TCPStore(is_master=not agent and self.rank == 0, **where)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise StartError(
                f"rank {self.rank} cannot reach the store at MASTER_ADDR:MASTER_PORT, by which ranks share a queue: "
                f"{str(error).splitlines()[0]}; start it with torchrun, or set TQ_CONFIG_FILE in all ranks"
            ) from None
        return self._store


def _read(file: str, host: str) -> AttachConfig:
    try:
        found, folder = os.lstat(file), os.lstat(os.path.dirname(file))
    except OSError:
        raise StartError(
            f"rank 0 started a queue on {host}, which processes of other machines cannot reach; start one with tq up "
            "or the operator, and set TQ_CONFIG_FILE or TQ_CONTROLLER_ADDRESS in all ranks"
        ) from None
    own = found.st_uid == folder.st_uid == os.getuid()
    if not own or not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or folder.st_mode & 0o022:
        raise StartError(f"{file}, which the store of this job names as the queue of rank 0, is not this user's alone")
    return load_document(AttachConfig, file).found_in("rank 0 of this job", folder=os.path.dirname(file))
