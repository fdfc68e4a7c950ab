"""Status of a node's RDMA fabric in the words of the Kubernetes API."""

from __future__ import annotations

from typing import Any

from transfer_queue.fabric import Hca, Resolution
from transfer_queue.fabric.filters import usable_port

__all__ = ["node_status", "rdma_condition"]

_MESSAGE_BYTES = 32768  # limit of a condition's message


def node_status(resolution: Resolution) -> dict[str, Any]:
    """Status of the node report: every HCA with link, rate, GID, NUMA node and why it is unusable, every GPU with its
    HCAs and distances. Rates in Gb/s; an unknown distance reads ``unknown``.
    """
    fabric, choice = resolution.fabric, resolution.decision.choice
    excluded = {e.hca: e.reason for e in choice.excluded} if choice else {}
    usable = [hca for hca in fabric.hcas if hca.name not in excluded]
    choices = {c.gpu.address: c for c in choice.gpus} if choice else {}
    gpus = []
    for gpu in fabric.gpus:
        chosen = choices.get(gpu.address)
        distances = {hca.name: fabric.distance(gpu, hca) for hca in fabric.hcas}
        gpus.append(
            {
                "name": gpu.name,
                "address": gpu.address,
                "numaNode": gpu.numa,
                "hcas": list(chosen.hcas) if chosen else [],
                "reason": chosen.reason if chosen else "not given to this container",
                "distances": {name: "unknown" if d is None else d.name for name, d in distances.items()},
            }
        )
    ports = [port for hca in usable if (port := usable_port(hca)) is not None]
    return {
        "summary": f"{len(usable)} of {len(fabric.hcas)} HCAs usable",
        "usable": f"{len(usable)}/{len(fabric.hcas)}",
        "links": ",".join(sorted({port.link_layer for port in ports})),
        "rates": ",".join(f"{rate:g}" for rate in sorted({port.rate for port in ports})),
        "unusable": "; ".join(f"{name}: {reason}" for name, reason in excluded.items()),
        "gpuCount": len(fabric.gpus),
        "distanceSource": fabric.source,
        "hcas": [_hca_status(hca, excluded.get(hca.name)) for hca in fabric.hcas],
        "gpus": gpus,
    }


def rdma_condition(resolution: Resolution) -> dict[str, str]:
    """The condition RdmaAvailable: False if the decision refuses RDMA or falls back to TCP, with the causes."""
    decision = resolution.decision
    if decision.transport == "rdma":
        degraded = decision.choice is not None and decision.choice.degraded
        status, reason = "True", "Degraded" if degraded else "UsableDevices"
    elif decision.fallback or decision.transport == "refused":
        status, reason = "False", "NoDevice" if not resolution.fabric.hcas else "RdmaUnavailable"
    else:
        status, reason = "False", "RdmaOff"
    return {
        "type": "RdmaAvailable",
        "status": status,
        "reason": reason,
        "message": "; ".join((decision.reason, *decision.warnings))[:_MESSAGE_BYTES],
    }


def _hca_status(hca: Hca, reason: str | None) -> dict[str, Any]:
    port = usable_port(hca) or next(iter(hca.ports), None)
    gids = sorted(port.gids, key=lambda gid: (not gid.roce_v2, gid.link_local, gid.index)) if port else []
    return {
        "name": hca.name,
        "address": hca.address,
        "numaNode": hca.numa,
        "linkLayer": port.link_layer if port else "",
        "state": port.state if port else "",
        "rate": f"{port.rate:g}" if port else "",
        "gid": gids[0].address if gids else "",
        "netdevs": list(hca.netdevs),
        "usable": reason is None,
        "reason": reason or "usable",
    }
