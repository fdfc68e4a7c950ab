"""The policy ``off | auto | required``: may this process use RDMA, and what if not.

Mooncake goes on over TCP without an error in several cases, or drops what it was asked for. ``required`` refuses each
of them beforehand; ``auto`` goes on over TCP or with less, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from transfer_queue.errors import ConfigError, StartError
from transfer_queue.fabric.choose import Choice, choose
from transfer_queue.fabric.files import read_text
from transfer_queue.fabric.filters import Selectors, usable_port
from transfer_queue.fabric.model import Fabric
from transfer_queue.fabric.mooncake import MooncakeSettings, gid_index, mooncake_settings

__all__ = ["Decision", "LockLimit", "Policy", "RdmaUnavailableError", "decide", "mixed_transports", "read_lock_limit"]

Policy = Literal["off", "auto", "required"]

_CAP_IPC_LOCK = 14
NO_DEVICE = (
    "no InfiniBand device found under /sys/class/infiniband: run on a node with an RDMA NIC and its driver loaded, "
    "request the node's RDMA resource for the pod, or set the policy to off (protocol tcp)"
)


class RdmaUnavailableError(StartError):
    """RDMA is required and cannot be used; the message lists every cause with what to do."""


@dataclass(frozen=True)
class LockLimit:
    """How much memory the process may lock for registration with an HCA."""

    nbytes: int | None  #: None is unlimited
    privileged: bool  #: holds CAP_IPC_LOCK, so the limit does not count

    def allows(self, nbytes: int) -> bool:
        return self.privileged or self.nbytes is None or self.nbytes >= nbytes


@dataclass(frozen=True)
class Decision:
    """What to do. ``transport`` is ``refused`` only under the policy ``required``."""

    policy: Policy
    transport: Literal["rdma", "tcp", "refused"]
    fallback: bool  #: RDMA was wanted and TCP is used
    reason: str
    warnings: tuple[str, ...] = ()
    choice: Choice | None = None
    settings: MooncakeSettings | None = None  #: present if transport is ``rdma``

    def raise_if_refused(self) -> None:
        """Raises RdmaUnavailableError with the reason if RDMA is required and cannot be used."""
        if self.transport == "refused":
            raise RdmaUnavailableError(self.reason)


@dataclass
class _Findings:
    fatal: list[str] = field(default_factory=list)  #: RDMA cannot work, or Mooncake would use TCP
    broken: list[str] = field(default_factory=list)  #: RDMA works, but not as asked


def decide(
    fabric: Fabric,
    policy: Policy,
    *,
    device_name: str = "auto",
    exclude: tuple[str, ...] = (),
    protocol: str = "rdma",
    environment: Mapping[str, str] | None = None,
    lock_limit: LockLimit | None = None,
    register_nbytes: int = 1 << 30,
    serves: bool = False,
) -> Decision:
    """Choose HCAs and judge them under the policy.

    ``device_name`` is the user's setting: ``auto`` (or empty), or names separated by commas. ``environment`` is that
    of the process: variables in it win over ours, so they are checked. ``register_nbytes`` is the least memory that
    the process will register; ``serves`` says that it holds a segment for all others.

    Raises ConfigError for an unknown policy; never raises for what it finds.
    """
    if policy not in get_args(Policy):
        raise ConfigError(f"rdma policy is {policy!r}, must be one of {', '.join(get_args(Policy))}")
    named = tuple(name.strip() for name in device_name.split(",") if name.strip() not in ("", "auto"))
    choice = choose(fabric, Selectors(named, exclude))
    if policy == "off" or (protocol == "tcp" and policy == "auto"):
        reason = "the RDMA policy is off" if policy == "off" else "the protocol is set to tcp"
        ignored = (f"protocol tcp ignores the device names {', '.join(named)}",) if named else ()
        return Decision(policy, "tcp", False, reason, ignored, choice)
    findings = _Findings()
    if protocol == "tcp":
        findings.fatal.append("the protocol is set to tcp while RDMA is required: set one or the other")
    _check_devices(fabric, choice, named, findings)
    settings = mooncake_settings(fabric, choice, serves=serves)
    _check_environment(choice, settings, environment or {}, findings)
    if lock_limit is not None and not lock_limit.allows(register_nbytes):
        findings.fatal.append(
            f"only {lock_limit.nbytes} bytes of memory may be locked, but {register_nbytes} have to be registered: "
            "raise the memlock limit (for a pod, that of the container runtime), or run as root with the capability "
            "IPC_LOCK, which containers of other users do not get"
        )
    warnings = tuple(dict.fromkeys((*choice.warnings, *choice.degraded, *settings.warnings)))
    if findings.fatal or (policy == "required" and findings.broken):
        reason = "; ".join(findings.fatal + (findings.broken if policy == "required" else []))
        if policy == "required":
            return Decision(policy, "refused", False, reason, warnings, choice)
        return Decision(policy, "tcp", True, f"falling back to TCP: {reason}", _merged(warnings, findings), choice)
    reason = f"using {settings.device_name}"
    return Decision(policy, "rdma", False, reason, _merged(warnings, findings), choice, settings)


def _merged(warnings: tuple[str, ...], findings: _Findings) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*warnings, *findings.broken)))


def _check_devices(fabric: Fabric, choice: Choice, named: tuple[str, ...], findings: _Findings) -> None:
    if not fabric.hcas:
        findings.fatal.append(NO_DEVICE)
        return
    excluded = {exclusion.hca: exclusion.reason for exclusion in choice.excluded}
    if not choice.usable:
        causes = "; ".join(f"{names}: {reason}" for reason, names in _by_reason(excluded).items())
        findings.fatal.append(f"none of the {len(fabric.hcas)} RDMA devices is usable ({causes})")
    for name in named:
        if any(letter in name for letter in "*?["):
            continue
        if fabric.hca(name) is None:
            findings.broken.append(
                f"{name} is named but not under /sys/class/infiniband; Mooncake would drop it without a word"
            )
        elif name in excluded and choice.usable:
            findings.broken.append(f"{name} is named but unusable ({excluded[name]}); Mooncake would go on without it")


def _by_reason(excluded: Mapping[str, str]) -> dict[str, str]:
    """Each reason once, with its first device and the number of further devices."""
    groups: dict[str, list[str]] = {}
    for name, reason in excluded.items():
        groups.setdefault(reason, []).append(name)
    return {
        reason: names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "") for reason, names in groups.items()
    }


def _check_environment(
    choice: Choice, settings: MooncakeSettings, environment: Mapping[str, str], findings: _Findings
) -> None:
    """Variables that make Mooncake do something else than it was told."""
    if environment.get("MC_FORCE_TCP"):
        findings.fatal.append("MC_FORCE_TCP is set, which makes Mooncake use TCP: unset it")
    if environment.get("MC_MS_AUTO_DISC", "").strip() == "1":
        findings.broken.append(
            "MC_MS_AUTO_DISC=1 makes Mooncake ignore the device names, and use TCP if it finds no device: unset it"
        )
    for variable in ("MC_USE_TENT", "MC_USE_TEV1"):
        if variable in environment:
            findings.broken.append(f"{variable} is set, which makes Mooncake ignore the device names: unset it")
    used = [hca for hca in choice.usable if hca.name in settings.devices]
    ports = [(hca.name, port) for hca in used if (port := usable_port(hca)) is not None]
    text = environment.get("MC_GID_INDEX") or environment.get("NCCL_IB_GID_INDEX")
    if not text:
        index, doubts = gid_index(ports)
        findings.broken += doubts if index is None else []
        return
    for name, port in ports:
        if text not in {str(gid.index) for gid in port.gids}:
            findings.fatal.append(
                f"MC_GID_INDEX (or NCCL_IB_GID_INDEX) is {text}, but {name} has no such GID (it has "
                f"{', '.join(str(gid.index) for gid in port.gids)}): unset it or give the right one"
            )


def mixed_transports(members: Mapping[str, str]) -> str | None:
    """Why members of one queue (name -> transport) may not work together, None if they may.

    A get from a member on the other transport returns no bytes and no error in Mooncake.
    """
    groups: dict[str, list[str]] = {}
    for member, transport in members.items():
        groups.setdefault(transport, []).append(member)
    if len(groups) < 2:
        return None
    listed = "; ".join(f"{transport}: {', '.join(sorted(names))}" for transport, names in sorted(groups.items()))
    return (
        f"members of one queue use different transports ({listed}), so reads between them return nothing: use one "
        "protocol for all, or the policy required"
    )


def read_lock_limit(root: str | Path = "/") -> LockLimit | None:
    """Limit of this very process from proc/self below ``root``, None where that does not exist."""
    limits = read_text(Path(root) / "proc/self/limits")
    status = read_text(Path(root) / "proc/self/status") or ""
    found = re.search(r"^Max locked memory\s+(\S+)", limits or "", re.MULTILINE)
    if found is None:
        return None
    capabilities = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", status, re.MULTILINE)
    privileged = bool(capabilities and int(capabilities[1], 16) >> _CAP_IPC_LOCK & 1)
    return LockLimit(None if found[1] == "unlimited" else int(found[1]), privileged)
