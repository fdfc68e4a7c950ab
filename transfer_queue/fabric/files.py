"""Reading small kernel files. A file that is missing or refuses to be read means "not known", never an error.

sysfs refuses on purpose: reading the type of an unused GID fails with EINVAL, for example.
"""

from __future__ import annotations

import os
from pathlib import Path

from transfer_queue.fabric.model import natural_key

__all__ = ["list_directory", "read_all", "read_int", "read_text"]

PAGE = 4096
"""A kernel file is no longer, and comes in one read."""


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


def read_all(directory: Path) -> dict[str, str]:
    """Text of each file of a directory by name, without surrounding blanks; what cannot be read is left out.

    For tables of hundreds of files, most of them alike: with as little as possible for each.
    """
    found: dict[str, str] = {}
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return found
    try:
        for name in os.listdir(folder):
            try:
                file = os.open(name, os.O_RDONLY, dir_fd=folder)
            except OSError:
                continue
            try:
                found[name] = os.read(file, PAGE).decode("utf-8", "replace").strip()
            except OSError:
                continue
            finally:
                os.close(file)
    finally:
        os.close(folder)
    return found
