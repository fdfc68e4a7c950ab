"""Show a resolution: a table for people, a document for programs."""

from __future__ import annotations

import shlex
from typing import Any

from transfer_queue.fabric.filters import rate_of, usable_port
from transfer_queue.fabric.model import Fabric, Hca
from transfer_queue.fabric.policy import Decision
from transfer_queue.fabric.resolve import Resolution

__all__ = ["document", "environment_lines", "table"]


def table(resolution: Resolution) -> str:
    """GPUs against HCAs, the choice with its reasons, the exclusions and the decision, as plain text."""
    fabric, decision = resolution.fabric, resolution.decision
    lines = [f"distances from {fabric.source}"]
    lines += _columns(_matrix(fabric, decision))
    if decision.choice is not None:
        lines += ["", "HCA", *_columns([_hca_row(hca, decision) for hca in fabric.hcas])]
        rows = [[f"  {c.gpu.name}", ", ".join(c.hcas) or "-", c.reason] for c in decision.choice.gpus]
        lines += ["", "choice", *_columns(rows)]
        if not decision.choice.gpus:
            lines.append("  no GPU here: host memory uses one HCA for each NUMA node, storage units use all")
    lines += [""] + [f"warning: {warning}" for warning in decision.warnings]
    lines.append(f"policy {decision.policy}: {decision.transport} ({decision.reason})")
    return "\n".join(line.rstrip() for line in lines)


def environment_lines(decision: Decision, topology_path: str | None = None) -> str:
    """KEY=value lines for a shell to source, TQ_RDMA_TRANSPORT and TQ_RDMA_DEVICES first."""
    variables = {"TQ_RDMA_TRANSPORT": decision.transport, "TQ_RDMA_DEVICES": ""}
    if decision.settings is not None:
        if topology_path is None:
            variables["TQ_RDMA_DEVICES"] = decision.settings.device_name
            variables.update(decision.settings.environment)
        else:
            variables.update(decision.settings.topology_environment(topology_path))
    return "".join(f"{key}={shlex.quote(value)}\n" for key, value in variables.items())


def document(resolution: Resolution) -> dict[str, Any]:
    """The resolution in JSON types. Rates in Gb/s; distances by name, null where unknown."""
    fabric, decision = resolution.fabric, resolution.decision
    excluded = {e.hca: e for e in decision.choice.excluded} if decision.choice else {}
    choices = {c.gpu.address: c for c in decision.choice.gpus} if decision.choice else {}
    gpus = []
    for gpu in fabric.gpus:
        chosen = choices.get(gpu.address)
        distances = {hca.name: fabric.distance(gpu, hca) for hca in fabric.hcas}
        gpus.append(
            {
                "name": gpu.name,
                "address": gpu.address,
                "uuid": gpu.uuid,
                "model": gpu.model,
                "numa": gpu.numa,
                "inContainer": gpu.in_container,
                "cudaIndex": gpu.index,
                "distances": {name: None if d is None else d.name for name, d in distances.items()},
                "hcas": list(chosen.hcas) if chosen else [],
                "fallback": list(chosen.fallback) if chosen else [],
                "reason": chosen.reason if chosen else "belongs to another container",
            }
        )
    hcas = []
    for hca in fabric.hcas:
        exclusion = excluded.get(hca.name)
        hcas.append(
            {
                "name": hca.name,
                "address": hca.address,
                "numa": hca.numa,
                "linkLayer": _link_layer(hca),
                "state": ", ".join(port.state for port in hca.ports),
                "rate": rate_of(hca) or max((port.rate for port in hca.ports), default=0.0),
                "gids": [gid.address for port in hca.ports for gid in port.gids],
                "netdevs": list(hca.netdevs),
                "usable": exclusion is None,
                "rule": exclusion.rule if exclusion else None,
                "reason": exclusion.reason if exclusion else "usable",
            }
        )
    settings = decision.settings
    return {
        "source": fabric.source,
        "gpus": gpus,
        "hcas": hcas,
        "policy": decision.policy,
        "transport": decision.transport,
        "fallback": decision.fallback,
        "reason": decision.reason,
        "warnings": list(decision.warnings),
        "deviceName": settings.device_name if settings else "",
        "environment": dict(settings.environment) if settings else {},
        "topology": {place: [list(a), list(b)] for place, (a, b) in settings.topology.items()} if settings else {},
    }


def _matrix(fabric: Fabric, decision: Decision) -> list[list[str]]:
    chosen = {c.gpu.address: c.hcas for c in decision.choice.gpus} if decision.choice else {}
    rows = [["", *(hca.name for hca in fabric.hcas)]]
    for gpu in fabric.gpus:
        cells = []
        for hca in fabric.hcas:
            distance = fabric.distance(gpu, hca)
            mark = "*" if hca.name in chosen.get(gpu.address, ()) else ""
            cells.append(("?" if distance is None else distance.name) + mark)
        rows.append([f"  {gpu.name}", *cells])
    return rows


def _hca_row(hca: Hca, decision: Decision) -> list[str]:
    excluded = {e.hca: e for e in decision.choice.excluded} if decision.choice else {}
    verdict = f"excluded ({excluded[hca.name].rule}): {excluded[hca.name].reason}" if hca.name in excluded else "usable"
    rate = rate_of(hca) or max((port.rate for port in hca.ports), default=0.0)
    return [f"  {hca.name}", hca.address or "-", _link_layer(hca) or "-", f"{rate:g} Gb/s", verdict]


def _link_layer(hca: Hca) -> str:
    port = usable_port(hca) or next(iter(hca.ports), None)
    return port.link_layer if port else ""


def _columns(rows: list[list[str]]) -> list[str]:
    if not rows:
        return ["  none"]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
