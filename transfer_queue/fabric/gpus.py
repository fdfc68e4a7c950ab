"""GPUs of the machine, of the container and of the process.

The three differ: sysfs lists every GPU of the machine even in a container that was given one. What a container was
given shows in ``/proc/driver/nvidia/gpus`` (masked by some runtimes), in the device files ``/dev/nvidiaN`` (with all
runtimes) and, where neither tells, in NVIDIA_VISIBLE_DEVICES. ``CUDA_VISIBLE_DEVICES`` narrows it to the process's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from transfer_queue.fabric.files import list_directory, read_int, read_text
from transfer_queue.fabric.model import Gpu
from transfer_queue.fabric.pci import chain_of

__all__ = ["read_gpus"]

_NVIDIA = 0x10DE
_DISPLAY_CLASS = 0x03


@dataclass(frozen=True)
class _Driver:
    """What the NVIDIA driver says about one GPU."""

    model: str
    uuid: str
    minor: int  #: N of /dev/nvidiaN, -1 where unknown


def read_gpus(root: Path, environment: Mapping[str, str]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """All GPUs in PCI address order, marked with what the container and the process see, and notes about doubts.

    CUDA's own order is taken to be the PCI address order. It is for equal GPUs; with unequal ones the process has to
    set CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    driver = _read_driver(root)
    on_bus = _read_bus(root)
    addresses = sorted(set(on_bus) | set(driver))
    nodes = _device_files(root) if driver and all(gpu.minor >= 0 for gpu in driver.values()) else None
    gpus = [
        Gpu(
            ordinal=ordinal,
            address=address,
            chain=on_bus.get(address, ((), -1))[0],
            numa=on_bus.get(address, ((), -1))[1],
            model=driver[address].model if address in driver else "",
            uuid=driver[address].uuid if address in driver else "",
            in_container=(address in driver or not driver) and (nodes is None or driver[address].minor in nodes),
        )
        for ordinal, address in enumerate(addresses)
    ]
    notes: list[str] = []
    narrowed = nodes is not None or len(driver) not in (0, len(gpus))
    visible = environment.get("NVIDIA_VISIBLE_DEVICES")
    if visible is not None and not narrowed and visible != "all":
        # Where files tell, this variable is not asked: its numbers are the host's, and some runtimes set "void".
        chosen = _select(visible.replace("void", "none"), gpus, "NVIDIA_VISIBLE_DEVICES", notes)
        gpus = [replace(gpu, in_container=gpu in chosen) for gpu in gpus]
    mine = [gpu for gpu in gpus if gpu.in_container]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    seen = mine if visible is None else _select(visible, mine, "CUDA_VISIBLE_DEVICES", notes)
    index = {gpu.address: number for number, gpu in enumerate(seen)}
    return tuple(replace(gpu, index=index.get(gpu.address)) for gpu in gpus), tuple(notes)


def _read_bus(root: Path) -> dict[str, tuple[tuple[str, ...], int]]:
    found: dict[str, tuple[tuple[str, ...], int]] = {}
    devices = root / "sys/bus/pci/devices"
    for entry in list_directory(devices):
        path = devices / entry
        if read_int(path / "vendor", -1) == _NVIDIA and read_int(path / "class", 0) >> 16 == _DISPLAY_CLASS:
            found[entry] = (chain_of(Path(os.path.realpath(path))), read_int(path / "numa_node", -1))
    return found


def _read_driver(root: Path) -> dict[str, _Driver]:
    found: dict[str, _Driver] = {}
    gpus = root / "proc/driver/nvidia/gpus"
    for entry in list_directory(gpus):
        facts = {}
        for line in (read_text(gpus / entry / "information") or "").splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
        found[entry.lower()] = _Driver(facts.get("Model", ""), facts.get("GPU UUID", ""), _minor(facts))
    return found


def _minor(facts: Mapping[str, str]) -> int:
    text = facts.get("Device Minor", "")
    return int(text) if text.isdigit() else -1


def _device_files(root: Path) -> frozenset[int] | None:
    """Numbers of /dev/nvidiaN, None if there are none (recording, or a container without GPUs)."""
    names = list_directory(root / "dev")
    return frozenset(int(name[6:]) for name in names if name.startswith("nvidia") and name[6:].isdigit()) or None


def _select(text: str, gpus: list[Gpu], variable: str, notes: list[str]) -> list[Gpu]:
    """GPUs that the variable names, in its order. As in CUDA, the first entry that names nothing ends the list."""
    chosen: list[Gpu] = []
    for word in (part.strip() for part in text.split(",")):
        if word in ("", "-1", "none", "NoDevFiles"):
            break
        if word.startswith("MIG-"):
            notes.append(f"{variable} names the MIG instance {word}, which does not tell its GPU: taking all GPUs")
            return list(gpus)
        gpu = _named(word.partition(":")[0] if word[0].isdigit() else word, gpus)
        if gpu is None:
            notes.append(f"{variable} names {word}, which is not among the {len(gpus)} GPUs here")
            break
        chosen.append(gpu)
    return chosen


def _named(word: str, gpus: Iterable[Gpu]) -> Gpu | None:
    for number, gpu in enumerate(gpus):
        if word == str(number) or (word.startswith("GPU-") and gpu.uuid.startswith(word)):
            return gpu
    return None
