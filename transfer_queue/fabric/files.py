"""Reading small kernel files. A file that is missing or refuses to be read means "not known", never an error.

sysfs refuses on purpose: reading the type of an unused GID fails with EINVAL, for example.
"""

from __future__ import annotations

import os
from pathlib import Path

from transfer_queue.fabric.model import natural_key

__all__ = ["list_directory", "read_int", "read_text"]


def read_text(path: Path) -> str | None:
    """The file's text without surrounding blanks, None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path, default: int) -> int:
    """The number in the file (decimal, or hexadecimal with 0x), ``default`` where there is none."""
    try:
        return int(read_text(path) or "", 0)
    except ValueError:
        return default


def list_directory(path: Path) -> list[str]:
    """Names in a directory in natural order, empty where it cannot be read."""
    try:
        return sorted(os.listdir(path), key=natural_key)
    except OSError:
        return []
