"""Which RDMA devices (HCAs) a process should use for which GPU.

A pure core over a directory tree, standard library only, shared by clients, storage units, the command line and the
operator::

    files, pci, gpus, sysfs, topology   read a tree (or a vendor's topology file) into a Fabric
    model                               the Fabric: GPUs, HCAs, ports, distances
    filters, spread, choose             Fabric -> Choice, every step with its reason
    mooncake, policy                    Choice -> settings for Mooncake, and rdma | tcp | refused
    resolve, report, __main__           all of it in one call, shown to people and programs
"""

from transfer_queue.fabric.choose import Choice, GpuChoice, choose
from transfer_queue.fabric.filters import Exclusion, Selectors
from transfer_queue.fabric.model import Distance, Fabric, Gid, Gpu, Hca, Port
from transfer_queue.fabric.mooncake import MooncakeSettings, mooncake_settings
from transfer_queue.fabric.policy import Decision, Policy, RdmaUnavailableError, decide, mixed_transports
from transfer_queue.fabric.report import document, environment_lines, table
from transfer_queue.fabric.resolve import Resolution, resolve
from transfer_queue.fabric.sysfs import read_fabric, read_traffic
from transfer_queue.fabric.topology import TopologyFile, read_topology

__all__ = [
    "Choice",
    "Decision",
    "Distance",
    "Exclusion",
    "Fabric",
    "Gid",
    "Gpu",
    "GpuChoice",
    "Hca",
    "MooncakeSettings",
    "Policy",
    "Port",
    "RdmaUnavailableError",
    "Resolution",
    "Selectors",
    "TopologyFile",
    "choose",
    "decide",
    "document",
    "environment_lines",
    "mixed_transports",
    "mooncake_settings",
    "read_fabric",
    "read_topology",
    "read_traffic",
    "resolve",
    "table",
]
