"""What Mooncake has to be told so that it uses the chosen HCAs and nothing else.

Facts (Mooncake 0.3.10 to 0.3.13, from its source and from running the wheel):

* Named devices (the ``device_name`` argument of ``setup``) switch auto-discovery off unless MC_MS_AUTO_DISC=1, which
  makes Mooncake ignore the names. With auto-discovery off, MC_CUSTOM_TOPO_JSON and MC_MS_FILTERS are ignored and a
  device that cannot be opened fails the set-up instead of falling back to TCP.
* MC_CUSTOM_TOPO_JSON is the path of a JSON file: location (``cpu:N``, ``cuda:N``) -> [[preferred], [available]].
  Exactly two lists per location; on any other shape Mooncake finds no device and goes on over TCP.
* MC_ENABLE_DEST_DEVICE_AFFINITY=1 makes a transfer arrive at the peer's device of the same name. Where the peer has
  not opened that name, any of its devices is taken without a word, so storage must open every rail.
* MC_GID_INDEX is one number for all devices of a process. Unset, Mooncake takes the IPv4 RoCE v2 entry, and GID 0 (a
  link-local RoCE v1 address) if there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transfer_queue.fabric.choose import Choice
from transfer_queue.fabric.filters import usable_port
from transfer_queue.fabric.model import Fabric, Gid, Hca, Port

__all__ = ["MooncakeSettings", "gid_index", "mooncake_settings", "process_devices"]


@dataclass(frozen=True)
class MooncakeSettings:
    """Settings of one process.

    Two ways exist to hand them over. *Named* is the default, and the only safe one under the policy ``required``:
    ``devices`` as ``device_name`` plus ``environment``. *Topology* lets a process fall back to farther HCAs:
    ``topology`` in a file, an empty ``device_name`` and ``topology_environment``.
    """

    devices: tuple[str, ...]  #: best first
    environment: Mapping[str, str]
    topology: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
    warnings: tuple[str, ...]

    @property
    def device_name(self) -> str:
        """The ``device_name`` argument of Mooncake's ``setup``."""
        return ",".join(self.devices)

    def topology_environment(self, path: str) -> dict[str, str]:
        """Variables for the topology way; ``path`` is where ``topology`` was written as JSON."""
        names = dict.fromkeys(name for lists in self.topology.values() for names in lists for name in names)
        return {
            **self.environment,
            "MC_MS_AUTO_DISC": "1",
            "MC_MS_FILTERS": ",".join(names),
            "MC_CUSTOM_TOPO_JSON": path,
        }


def mooncake_settings(fabric: Fabric, choice: Choice, *, serves: bool = False) -> MooncakeSettings:
    """Settings for the process whose GPUs have an ``index``; without GPUs for host memory alone.

    ``serves``: it holds a segment that all others read and write.
    """
    devices = process_devices(choice, serves=serves)
    by_name = {hca.name: hca for hca in choice.usable}
    chosen = [by_name[name] for name in devices]
    ports = [(hca.name, port) for hca in chosen if (port := usable_port(hca)) is not None]
    index, warnings = gid_index(ports)
    environment = {"MC_ENABLE_DEST_DEVICE_AFFINITY": "1", "MC_MS_AUTO_DISC": "0"}
    if index is not None:
        environment["MC_GID_INDEX"] = str(index)
    numbers = {port.number for _, port in ports}
    if numbers - {1}:
        # Mooncake opens port 1 of every device unless told otherwise, and can be told only one number.
        environment["MC_IB_PORT"] = str(max(numbers))
        if len(numbers) > 1:
            warnings.append(
                f"the usable ports of {', '.join(devices)} have different numbers, but Mooncake takes one number "
                "(MC_IB_PORT) for all: name devices of one port number only"
            )
    return MooncakeSettings(devices, environment, _topology(fabric, choice, devices), tuple(warnings))


def process_devices(choice: Choice, *, serves: bool = False) -> tuple[str, ...]:
    """HCAs of the process's GPUs in CUDA order, or one for each NUMA node without GPUs.

    A process that serves the GPUs of others opens all HCAs, regardless of the GPUs that it sees.
    """
    if serves:
        return tuple(hca.name for hca in choice.usable)
    own = sorted((c for c in choice.gpus if c.gpu.index is not None), key=lambda c: c.gpu.index or 0)
    names = dict.fromkeys(name for c in own for name in c.hcas)
    if names:
        return tuple(names)
    nodes: dict[int, str] = {}
    for hca in choice.usable:
        nodes.setdefault(hca.numa, hca.name)
    return tuple(nodes.values())


def gid_index(ports: Sequence[tuple[str, Port]]) -> tuple[int | None, list[str]]:
    """The index to put into MC_GID_INDEX for these (HCA, port), None where Mooncake finds it by itself; warnings."""
    roce = [(name, port) for name, port in ports if port.link_layer == "Ethernet"]
    if all(any(gid.ipv4 and gid.roce_v2 for gid in port.gids) for _, port in roce):
        return None, []
    indexes = [{gid.index: gid for gid in port.gids if gid.roce_v2} for _, port in roce]
    common = set(indexes[0]).intersection(*indexes[1:])
    if not common:
        return None, [
            f"no GID index holds a RoCE v2 address on all of {', '.join(name for name, _ in roce)}; Mooncake takes "
            "GID 0 (RoCE v1, link-local): give the network devices an IP address each"
        ]
    best = min(common, key=lambda index: (max(_reach(table[index]) for table in indexes), index))
    warnings = []
    if any(table[best].link_local for table in indexes):
        warnings.append(
            f"GID {best} is link-local, so only hosts on the same Ethernet segment can be reached: give the network "
            f"devices of {', '.join(name for name, _ in roce)} an IP address each"
        )
    return best, warnings


def _reach(gid: Gid) -> tuple[bool, bool, bool]:
    """Smaller reaches farther; an address of another network namespace comes late."""
    return (gid.link_local, gid.netdev is None, not gid.ipv4)


def _topology(
    fabric: Fabric, choice: Choice, devices: tuple[str, ...]
) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Preferred and available HCAs for host memory of each NUMA node and for each GPU of the process."""
    has_gpu = any(c.gpu.index is not None for c in choice.gpus)
    nodes = fabric.numa_nodes or tuple(sorted({max(hca.numa, 0) for hca in choice.usable}))

    def preferred(hca: Hca, node: int) -> bool:
        return hca.name in devices if has_gpu else hca.numa == node

    topology: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for node in nodes:
        first = tuple(hca.name for hca in choice.usable if preferred(hca, node))
        topology[f"cpu:{node}"] = (first, tuple(hca.name for hca in choice.usable if hca.name not in first))
    for c in choice.gpus:
        if c.gpu.index is not None:
            topology[f"cuda:{c.gpu.index}"] = (c.hcas, c.fallback)
    return topology
