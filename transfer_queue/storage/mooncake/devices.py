"""RDMA devices of this process. They are chosen here: the engine goes on over TCP without a word if it finds none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from transfer_queue import fabric

__all__ = ["choose_devices"]

log = logging.getLogger(__name__)


def choose_devices(
    device_name: str, environment: Mapping[str, str], *, segment_bytes: int, root: str | Path = "/"
) -> fabric.MooncakeSettings:
    """Devices and variables for the engine: those named, or with ``auto`` the nearest to this process's GPUs.

    A process with a segment serves the GPUs of all others, so it opens every rail; one without GPUs opens one rail for
    each NUMA node. TCP is never an answer: a process on TCP and one on RDMA read nothing from each other. Raises
    RdmaUnavailableError with every cause.
    """
    process = {**environment, "MC_MS_AUTO_DISC": "0"}  # as set-up will have it
    resolution = fabric.resolve(
        root,
        process,
        # Names are an order: a wrong one is refused, although the engine could do with the rest.
        policy="auto" if device_name == "auto" else "required",
        device_name=device_name,
        register_nbytes=segment_bytes,
        serves=segment_bytes > 0,
    )
    decision = resolution.decision
    present = [hca.name for hca in resolution.fabric.hcas]
    for name in (part.strip() for part in device_name.split(",")):
        if name not in ("", "auto", *present) and not any(letter in name for letter in "*?["):
            raise fabric.RdmaUnavailableError(
                f"deviceName: no InfiniBand device {name!r} under /sys/class/infiniband; "
                f"present: {', '.join(present) or 'none'}"
            )
    if decision.settings is None:
        raise fabric.RdmaUnavailableError(
            f"protocol rdma cannot be used: {decision.reason.removeprefix('falling back to TCP: ')}; "
            "or set protocol: tcp for the whole queue"
        )
    for warning in decision.warnings:
        log.warning("%s", warning)
    return decision.settings
