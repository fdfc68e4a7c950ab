"""From a directory tree to a decision: the one call behind the command line, ``tq doctor``, pods and clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from transfer_queue.errors import ConfigError
from transfer_queue.fabric.model import Fabric
from transfer_queue.fabric.policy import Decision, Policy, decide, read_lock_limit
from transfer_queue.fabric.sysfs import read_fabric
from transfer_queue.fabric.topology import TopologyFile, read_topology

__all__ = ["Resolution", "resolve"]


@dataclass(frozen=True)
class Resolution:
    """The fabric as read and the decision about it."""

    fabric: Fabric
    decision: Decision


def resolve(
    root: str | Path = "/",
    environment: Mapping[str, str] | None = None,
    *,
    policy: Policy = "auto",
    protocol: str = "rdma",
    device_name: str = "auto",
    exclude: tuple[str, ...] = (),
    topology_file: str | Path | None = None,
    register_nbytes: int = 1 << 30,
    serves: bool = False,
) -> Resolution:
    """Read the tree below ``root`` and decide. ``serves``: the process holds a segment for all others.

    ``environment`` is that of the process which will move the data. ``topology_file`` has to be readable (ConfigError
    otherwise); one named by NCCL_TOPO_FILE may be missing, since that variable often outlives the file.
    """
    variables = environment or {}
    topology: TopologyFile | None = None
    note = None
    if topology_file is not None:
        topology = read_topology(topology_file)
    elif variables.get("NCCL_TOPO_FILE"):
        try:
            topology = read_topology(variables["NCCL_TOPO_FILE"])
        except ConfigError as error:
            note = f"NCCL_TOPO_FILE is not used: {error}"
    fabric = read_fabric(root, variables, topology)
    if note is not None:
        fabric = replace(fabric, notes=(*fabric.notes, note))
    decision = decide(
        fabric,
        policy,
        device_name=device_name,
        exclude=exclude,
        protocol=protocol,
        environment=variables,
        lock_limit=read_lock_limit(root),
        register_nbytes=register_nbytes,
        serves=serves,
    )
    return Resolution(fabric, decision)
