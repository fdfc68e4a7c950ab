"""A store of a user's own, plugged in as 0.1.x has it: a folder with a file for each key."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
from transfer_queue.storage.clients.base import StorageClientFactory, StorageKVClient
from transfer_queue.storage.managers.base import KVStorageManager, StorageManager, StorageManagerFactory


class Table:
    """Values by key."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def put(self, values: dict[str, Any]) -> None:
        for key, value in values.items():
            np.save(self._folder / f"{key}.npy", value)

    def get(self, keys: list[str]) -> list[Any]:
        if any(key not in self.keys() for key in keys):
            raise KeyError(f"not all of {keys}")
        return [np.load(self._folder / f"{key}.npy") for key in keys]

    def clear(self, keys: list[str]) -> None:
        for key in keys:
            (self._folder / f"{key}.npy").unlink()

    def keys(self) -> list[str]:
        return sorted(path.stem for path in self._folder.iterdir())


@StorageClientFactory.register("TableClient")
class TableClient(StorageKVClient):
    """Remembers of each key who put it, and insists on getting that back."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.table = Table(config["folder"])

    def put(self, keys: list[str], values: list[Any]) -> list[Any] | None:
        if any(value.numel() > 50_000_000 for value in values):
            raise OSError("the disk is on fire")
        self.table.put({key: value.numpy() for key, value in zip(keys, values, strict=True)})
        return [{"by": os.getpid(), "key": key} for key in keys]

    def get(
        self, keys: list[str], shapes: Any = None, dtypes: Any = None, custom_backend_meta: Any = None
    ) -> list[Any]:
        import torch

        assert [meta["key"] for meta in custom_backend_meta] == keys
        values = [torch.from_numpy(value) for value in self.table.get(keys)]
        assert [tuple(value.shape) for value in values] == [tuple(shape) for shape in shapes]
        assert [value.dtype for value in values] == dtypes
        return values

    def clear(self, keys: list[str], custom_backend_meta: Any = None) -> None:
        assert [meta["key"] for meta in custom_backend_meta] == keys
        self.table.clear(keys)


@StorageManagerFactory.register("TableStore")
class TableManager(KVStorageManager):
    def __init__(self, controller_info: Any, config: dict[str, Any]) -> None:
        config["client_name"] = "TableClient"
        super().__init__(controller_info, config)


@StorageBootstrapProvider.register_provider("TableStore")
def start(conf: Any) -> None:
    conf.backend.TableStore.folder = tempfile.mkdtemp(prefix="tq-table-")


@StorageManagerFactory.register("RowStore")
class RowManager(StorageManager):
    """Not over a key-value client, and all in this process: rows by index; the way back to them by the notification."""

    rows: dict[str, Any] = {}  # noqa: RUF012 - of the class: it outlives its managers

    async def put_data(self, data: Any, metadata: Any, data_parser: Any = None) -> None:
        (field,) = data.keys()
        metas = {}
        for index, value in zip(metadata.global_indexes, data[field].unbind(0), strict=True):
            self.rows[f"row-{index}"] = bytes(value.numpy())
            metas[index] = {field: f"row-{index}"}
        await self.notify_data_update(metadata.partition_ids[0], metadata.global_indexes, {}, metas)

    async def get_data(self, metadata: Any) -> Any:
        (field,) = metadata.field_names
        return {field: [self.rows[meta[field]] for meta in metadata._custom_backend_meta]}

    async def clear_data(self, metadata: Any) -> None:
        (field,) = metadata.field_names
        for meta in metadata._custom_backend_meta:
            del self.rows[meta[field]]
