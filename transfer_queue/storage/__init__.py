"""Where blocks are kept: one folder per backend behind the protocols of :mod:`transfer_queue.storage.base`.

Names of 0.1.x that are imported from here are looked up in ``transfer_queue.compat.paths``.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return importlib.import_module("transfer_queue.compat.paths").legacy_attribute(__name__, name)
