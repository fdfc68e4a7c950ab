"""Import paths of 0.1.x: modules that are a table here, made when they are imported."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["MODULES", "install_finder", "legacy_attribute", "legacy_names"]

_INFO = "transfer_queue.compat.server_info"
_CLIENT = "transfer_queue.compat.client"
_PLUGINS = "transfer_queue.compat.plugins"
_REGISTRY = "transfer_queue.compat.registered.registry"
_UTILITIES = "transfer_queue.compat.utilities"
_ACTORS = "transfer_queue.compat.actor_class"
_PLACEMENT = "transfer_queue.compat.placement"

_ADDRESSES = {
    "ZMQServerInfo": _INFO,
    "process_zmq_server_info": _UTILITIES,
    "get_node_ip_address": _UTILITIES,
    "get_free_port": _UTILITIES,
    "format_zmq_address": _UTILITIES,
    "is_ipv6_address": _UTILITIES,
    "get_node_ip_address_raw": f"{_UTILITIES}:get_node_ip_address",
}
_COMMON = {
    "limit_pytorch_auto_parallel_threads": _UTILITIES,
    "get_env_bool": _UTILITIES,
    "get_placement_group": _PLACEMENT,
    "get_node_round_robin_scheduling_strategies": _PLACEMENT,
}
_ENUMS = {"ExplicitEnum": _INFO, "Role": _INFO, "ProductionStatus": "transfer_queue.metadata"}
_OLD_ENUMS = {"TransferQueueRole": f"{_INFO}:Role"}
_PACKING = dict.fromkeys(
    ("batch_decode_from", "batch_encode_into", "calc_packed_size", "pack_into", "unpack_from"), "transfer_queue.columns"
)
_ERROR = {"StorageKeyNotFoundError": "transfer_queue.errors"}
_MANAGER_BASE = {"StorageManager": _REGISTRY, "StorageManagerFactory": _PLUGINS, "KVStorageManager": _REGISTRY}
_OLD_MANAGER_BASE = {
    "TransferQueueStorageManager": f"{_REGISTRY}:StorageManager",
    "TransferQueueStorageManagerFactory": f"{_PLUGINS}:StorageManagerFactory",
}
_SIMPLE = {"AsyncSimpleStorageManager": _PLUGINS}
_MOONCAKE = {"MooncakeStorageManager": _PLUGINS}
_YUANRONG = {"YuanrongStorageManager": _PLUGINS}
_RAY = {"RayStorageManager": _PLUGINS}
_CLIENT_BASE = {"StorageKVClient": _REGISTRY, "StorageClientFactory": _REGISTRY}
_OLD_CLIENT_BASE = {
    "TransferQueueStorageKVClient": f"{_REGISTRY}:StorageKVClient",
    "TransferQueueStorageClientFactory": f"{_REGISTRY}:StorageClientFactory",
}
_CLIENTS = {
    "MooncakeStoreClient": _PLUGINS,
    "MooncakeStorageClient": f"{_PLUGINS}:MooncakeStoreClient",
    "YuanrongStorageClient": _PLUGINS,
    "RayStorageClient": _PLUGINS,
}
_UNIT = {
    "StorageUnitData": "transfer_queue.compat.unit_data",
    "SimpleStorageUnit": _ACTORS,
}
_TOKEN_BUDGET = {"StreamingTokenBudgetSampler": "transfer_queue.compat.token_budget"}

MODULES: dict[str, dict[str, str]] = {
    "transfer_queue": {
        "ZMQServerInfo": _INFO,
        "process_zmq_server_info": _UTILITIES,
        "get_placement_group": _PLACEMENT,
        "TransferQueueController": _ACTORS,
        "SimpleStorageUnit": _ACTORS,
        **_TOKEN_BUDGET,
    },
    "transfer_queue.sampler.streaming_token_budget_sampler": _TOKEN_BUDGET,
    "transfer_queue.interface": dict.fromkeys(("load_checkpoint", "save_checkpoint"), "transfer_queue.checkpoint"),
    "transfer_queue.client": {
        **dict.fromkeys(("AsyncTransferQueueClient", "TransferQueueClient"), _CLIENT),
        "process_zmq_server_info": _UTILITIES,
    },
    "transfer_queue.controller": {
        "TransferQueueController": _ACTORS,
        "DataPartitionStatus": "transfer_queue.control.sampler_adapter:PartitionView",
    },
    "transfer_queue.storage": {**_MANAGER_BASE, **_SIMPLE, **_MOONCAKE, **_YUANRONG, **_RAY, **_CLIENT_BASE, **_UNIT}
    | _OLD_MANAGER_BASE
    | _ERROR,
    "transfer_queue.storage.simple_storage": {**_UNIT, **_ERROR},
    "transfer_queue.storage.simple_backend": _UNIT,
    "transfer_queue.storage.managers": {**_MANAGER_BASE, **_SIMPLE, **_MOONCAKE, **_YUANRONG, **_RAY}
    | _OLD_MANAGER_BASE,
    "transfer_queue.storage.managers.base": _MANAGER_BASE | _OLD_MANAGER_BASE,
    "transfer_queue.storage.managers.factory": _MANAGER_BASE | _OLD_MANAGER_BASE,
    "transfer_queue.storage.managers.simple_storage_manager": _SIMPLE,
    "transfer_queue.storage.managers.simple_backend_manager": _SIMPLE,
    "transfer_queue.storage.managers.mooncake_manager": _MOONCAKE,
    "transfer_queue.storage.managers.yuanrong_manager": _YUANRONG,
    "transfer_queue.storage.managers.ray_storage_manager": _RAY,
    "transfer_queue.storage.clients": _CLIENT_BASE | _OLD_CLIENT_BASE | _CLIENTS,
    "transfer_queue.storage.clients.base": _CLIENT_BASE | _OLD_CLIENT_BASE,
    "transfer_queue.storage.clients.factory": _CLIENT_BASE | _OLD_CLIENT_BASE,
    "transfer_queue.storage.clients.mooncake_client": {
        **{name: _CLIENTS[name] for name in ("MooncakeStoreClient", "MooncakeStorageClient")},
        "RegisterBufferType": _CLIENT,
    },
    "transfer_queue.storage.clients.yuanrong_client": {"YuanrongStorageClient": _PLUGINS},
    "transfer_queue.storage.clients.ray_storage_client": {"RayStorageClient": _PLUGINS},
    "transfer_queue.storage.bootstrap": {"StorageBootstrapProvider": _REGISTRY},
    "transfer_queue.storage.bootstrap.provider": {"StorageBootstrapProvider": _REGISTRY},
    "transfer_queue.utils": {},
    "transfer_queue.utils.zmq_utils": _ADDRESSES,
    "transfer_queue.utils.common": _COMMON,
    "transfer_queue.utils.utils": {**_COMMON, **_ENUMS, **_OLD_ENUMS},
    "transfer_queue.utils.enum_utils": {**_ENUMS, **_OLD_ENUMS},
    "transfer_queue.utils.logging_utils": {"get_logger": _UTILITIES},
    "transfer_queue.utils.serial_utils": _PACKING,
    "transfer_queue.utils.tensor_utils": dict.fromkeys(
        ("allocate_empty_tensors", "compute_stride", "get_nbytes", "merge_contiguous_memory"),
        "transfer_queue.compat.tensors",
    ),
}
"""Module -> name -> where it is: ``module`` or, if it is called otherwise there, ``module:name``."""

_DEPRECATED = {
    "transfer_queue": "import it from transfer_queue.controller, transfer_queue.storage or transfer_queue.utils",
    "transfer_queue.storage.simple_backend": "import it from transfer_queue.storage.simple_storage",
    "transfer_queue.storage.managers.simple_backend_manager": "import it from transfer_queue.storage.managers",
    "transfer_queue.utils.utils": "import it from transfer_queue.utils.common or transfer_queue.utils.enum_utils",
    "TransferQueueRole": "use Role",
    "TransferQueueStorageManager": "use StorageManager",
    "TransferQueueStorageManagerFactory": "use StorageManagerFactory",
    "TransferQueueStorageKVClient": "use StorageKVClient",
    "TransferQueueStorageClientFactory": "use StorageClientFactory",
    "MooncakeStorageClient": "use MooncakeStoreClient",
    "get_node_ip_address_raw": "use get_node_ip_address",
    "StreamingTokenBudgetSampler": "",
}
"""Modules and names of 0.1.5 and 0.1.6 that 0.1.11 no longer has, with what to do; nothing for one of a fork."""
_warned: set[tuple[str, str]] = set()


def legacy_names(module: str) -> list[str]:
    """Names of 0.1.x that ``module`` has from here."""
    return sorted(MODULES.get(module, ()))


def legacy_attribute(module: str, name: str) -> Any:
    """``module.name`` of 0.1.x. Warns (DeprecationWarning) at the first use of a name that 0.1.11 dropped.

    Raises AttributeError.
    """
    home = MODULES.get(module, {}).get(name)
    if home is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    advice = _DEPRECATED.get(name, _DEPRECATED.get(module))
    if advice and (module, name) not in _warned:
        _warned.add((module, name))
        warnings.warn(f"{module}.{name} is deprecated: {advice}", DeprecationWarning, stacklevel=3)
    target, _, renamed = home.partition(":")
    return getattr(importlib.import_module(target), renamed or name)


class _LegacyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `MODULES` that are no files, and makes them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MODULES:
            return None
        package = any(name.startswith(f"{fullname}.") for name in MODULES)
        return importlib.machinery.ModuleSpec(fullname, self, origin="transfer_queue.compat", is_package=package)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__doc__ = f"Import path of 0.1.x; the names are found through {__name__}."
        vars(module).update(
            __all__=legacy_names(name),
            __getattr__=lambda attribute: legacy_attribute(name, attribute),
            __dir__=lambda: legacy_names(name),
        )


def install_finder() -> None:
    """Make the modules importable. Idempotent."""
    if not any(isinstance(finder, _LegacyModules) for finder in sys.meta_path):
        sys.meta_path.append(_LegacyModules())
