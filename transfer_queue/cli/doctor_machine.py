"""Checks of the machine or pod: software, ports, memory, limits, RDMA."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import resource as limits_of_process
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil

from transfer_queue.cli.findings import Finding, Subject, fail, ok, warn
from transfer_queue.cli.output import human_bytes
from transfer_queue.cli.state import read_running, state_root
from transfer_queue.errors import ConfigError, StartError
from transfer_queue.fabric import Fabric, Resolution, resolve
from transfer_queue.runtime.memory import left_of_groups
from transfer_queue.storage.mooncake import engine

__all__ = [
    "MINIMUM_VERSIONS",
    "limits",
    "memory",
    "mooncake",
    "packages",
    "ports",
    "python",
    "rdma",
    "shared_memory",
    "state_folder",
]

MINIMUM_VERSIONS = {
    "msgspec": "0.19",
    "numpy": "1.26",
    "pydantic": "2.9",
    "pyyaml": "6",
    "omegaconf": "2.3",
    "cloudpickle": "3",
    "prometheus-client": "0.21",
    "typer": "0.15",
    "rich": "13.9",
    "psutil": "6",
    "torch": "2.6",
    "tensordict": "0.10",
}
"""Requirements of pyproject.toml."""
_CLIENTS_ONLY = ("torch", "tensordict")
_FEW_FILES, _TOO_FEW_FILES = 8192, 1024
_DOCKER_SHM = 64 << 20
_LEAST_STATE = 16 << 20
"""Bytes that the state folder should have free."""


def python(subject: Subject) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 10) <= sys.version_info[:2] <= (3, 13):
        yield ok("python", f"{version} at {sys.executable}")
    else:
        yield fail("python", f"{version} is not supported", "use Python 3.10 to 3.13")


def packages(subject: Subject) -> Iterator[Finding]:
    wrong = False
    for name, minimum in MINIMUM_VERSIONS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong = True
            fix = f"pip install '{name}>={minimum}'"
            if name in _CLIENTS_ONLY:
                yield warn(
                    "packages", f"{name} is missing: servers run without it, programs that put and get do not", fix
                )
            else:
                yield fail("packages", f"{name} is missing", fix)
            continue
        if _order(version) < _order(minimum):
            wrong = True
            text = f"{name} {version} is too old, {minimum} or newer is needed"
            yield fail("packages", text, f"pip install -U '{name}>={minimum}'")
    if importlib.util.find_spec("uvloop") is None:
        yield warn("packages", "uvloop is missing; servers and clients are slower without it", "pip install uvloop")
    if not wrong:
        yield ok("packages", "all there and new enough")


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def mooncake(subject: Subject) -> Iterator[Finding]:
    needed = subject.uses_mooncake
    wrong = fail if needed else warn
    try:
        binary = engine.find_master()
    except StartError as error:
        text, _, fix = str(error).partition(": ")
        if needed or engine.installed_version() is not None:
            yield wrong("mooncake", text, fix)
        else:
            yield ok("mooncake", "not installed, and no queue that is looked at here needs it")
        return
    try:
        shown = subprocess.run([binary, "--help"], capture_output=True, text=True, check=False, timeout=30)
        said = shown.stdout + shown.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if "-rpc_port" in said:
        yield ok("mooncake", f"{engine.installed_version() or 'built from source'}, mooncake_master at {binary}")
        return
    text, _, fix = (engine.explain_load_error(said, "mooncake_master") or "").partition(": ")
    yield wrong(
        "mooncake", text or f"{binary} does not run: {' '.join(said.split())[-200:]}", fix or "reinstall Mooncake"
    )


def ports(subject: Subject) -> Iterator[Finding]:
    """That the planned servers can listen where they shall."""
    if subject.plan is None:
        return
    plan = subject.plan
    if any(queue.name == plan.name for queue in read_running()):
        yield ok("ports", f"in use by queue {plan.name}, which runs here")
        return
    wanted = {"spec.controller.port": plan.controller.port, "spec.controller.metricsPort": plan.controller.metrics_port}
    for shard in range(1, plan.shards):
        wanted[f"spec.controller.port + {shard}"] = plan.controller.port + shard
        wanted[f"spec.controller.metricsPort + {shard}"] = (plan.controller.metrics_port or 0) + shard
    for number, unit in enumerate(plan.units):
        wanted[f"spec.storage.port + {number}"] = unit.port
        wanted[f"spec.storage.metricsPort + {number}"] = unit.metrics_port
    if plan.master is not None:
        wanted["spec.backend.mooncake.master.rpcPort"] = plan.master.rpc_port
        wanted["spec.backend.mooncake.master.metricsPort"] = plan.master.metrics_port
    taken = [(setting, port) for setting, port in wanted.items() if port and (reason := _unusable(port))]
    for setting, port in taken:
        reason = _unusable(port) or "it is free again"
        yield fail(
            "ports", f"port {port} ({setting}): {reason}{_holder(port)}", f"end what uses it, or set another {setting}"
        )
    if not taken:
        yield ok("ports", f"{len(wanted)} ports of queue {plan.name} are free")


def _unusable(port: int) -> str:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return ""


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and getattr(connection.laddr, "port", 0) == port
            if listens and connection.pid:
                return f", by pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        pass  # other users' processes are not ours to see
    return ""


def shared_memory(subject: Subject) -> Iterator[Finding]:
    folder = subject.shared_memory
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        yield fail("shared memory", f"{folder}: {error.strerror}", f"mount a tmpfs at {folder}")
        return
    if not os.access(folder, os.W_OK):
        yield fail("shared memory", f"{folder} cannot be written", f"chmod 1777 {folder}, or run as another user")
        return
    text = f"{human_bytes(usage.free)} free of {human_bytes(usage.total)} in {folder}"
    needed = 0
    if subject.plan is not None and subject.plan.controller.backend.kind == "simple":
        needed = sum(unit.capacity for unit in subject.plan.units)
    grow = f"mount {folder} larger (docker run --shm-size, a Kubernetes emptyDir of medium Memory)"
    if needed > usage.free:
        fix = f"lower spec.storage.capacity or replicas, or {grow}"
        problem = f"{text}, but the storage units need {human_bytes(needed)}"
        if subject.plan is not None and subject.plan.controller.durability == "none":
            yield warn("shared memory", f"{problem}: rows will be kept in files, which is slower", fix)
        else:
            yield fail("shared memory", problem, fix)
    elif usage.total <= _DOCKER_SHM:
        yield warn("shared memory", f"{text}: only small blocks will go through it", grow)
    else:
        yield ok("shared memory", text)


def memory(subject: Subject) -> Iterator[Finding]:
    available, source = psutil.virtual_memory().available, "available"
    left = min(left_of_groups(subject.root), default=available)
    if left < available:
        available, source = max(0, left), "left of this container's limit"
    needed = sum(unit.capacity for unit in subject.plan.units) if subject.plan is not None else 0
    if needed > available:
        text = f"{human_bytes(available)} {source}, but the storage units may take {human_bytes(needed)}"
        yield fail("memory", text, "lower the capacity of the storage units or their number, or raise the memory limit")
    else:
        yield ok("memory", f"{human_bytes(available)} {source}")


def limits(subject: Subject) -> Iterator[Finding]:
    soft, hard = limits_of_process.getrlimit(limits_of_process.RLIMIT_NOFILE)
    fix = f"ulimit -n {max(_FEW_FILES, 65536)} (LimitNOFILE= in a systemd unit; the hard limit is {hard})"
    if soft < _TOO_FEW_FILES:
        yield fail("limits", f"only {soft} files may be open; each client and each storage unit needs some", fix)
    elif soft < _FEW_FILES:
        yield warn("limits", f"{soft} files may be open: enough for a few hundred clients", fix)
    else:
        yield ok("limits", f"{soft} files may be open")


def state_folder(subject: Subject) -> Iterator[Finding]:
    folder = state_root()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK):
        free = shutil.disk_usage(existing).free
        if free < _LEAST_STATE:
            text = f"{folder}: its disk has {free >> 10} KiB free, and queues keep settings and logs there"
            yield warn("state folder", text, "make room, or set XDG_STATE_HOME to a folder on another disk")
        else:
            yield ok("state folder", str(folder))
    else:
        reason = "cannot be written" if existing.is_dir() else "is not a folder"
        yield fail(
            "state folder", f"{existing} {reason}, so tq up cannot run", "set XDG_STATE_HOME to a folder of yours"
        )


def rdma(subject: Subject) -> Iterator[Finding]:
    spec = subject.wanted.spec if subject.wanted is not None else None
    protocol = spec.transport if spec is not None else "rdma"
    policy = spec.rdma.policy if spec is not None else "auto"
    device = spec.backend.mooncake.device_name if spec is not None and spec.backend.mooncake is not None else "auto"
    try:
        found = resolve(subject.root, os.environ, policy=policy, protocol=protocol, device_name=device)
    except ConfigError as error:
        yield fail("rdma", str(error), "correct the setting that it names")
        return
    yield from _devices(found)
    decision = found.decision
    if decision.transport == "refused":
        yield fail("rdma", f"required, but {decision.reason}", "fix the devices, or set spec.rdma.policy to auto")
    elif decision.fallback and found.fabric.hcas:
        yield warn("rdma", decision.reason, "fix the devices, or set the protocol to tcp")
    elif decision.fallback and spec is not None:
        yield warn("rdma", "no RDMA device here; TCP is used", "set the protocol to tcp, or run where there is one")
    elif not found.fabric.hcas:
        yield ok("rdma", "no RDMA device here; TCP is used")
    else:
        yield ok("rdma", f"{decision.transport}: {decision.reason}")
    for warning in decision.warnings:
        yield warn("rdma", warning, "see python -m transfer_queue.fabric")


def _devices(found: Resolution) -> Iterator[Finding]:
    choice = found.decision.choice
    if choice is None:
        return
    for excluded in choice.excluded:
        port_down = any(
            port.state != "ACTIVE" for hca in found.fabric.hcas if hca.name == excluded.hca for port in hca.ports
        )
        fix = "check cable, switch port and driver (ibstat)" if port_down else "see python -m transfer_queue.fabric"
        yield warn("rdma", f"{excluded.hca} is not used: {excluded.reason}", fix)
    for gpu in choice.gpus:
        near = ", ".join(f"{name} ({_distance(found.fabric, gpu.gpu.address, name)})" for name in gpu.hcas)
        yield ok("rdma", f"{gpu.gpu.name} uses {near or 'no device'}")


def _distance(fabric: Fabric, gpu: str, hca: str) -> str:
    for one in fabric.gpus:
        for other in fabric.hcas:
            if one.address == gpu and other.name == hca and (distance := fabric.distance(one, other)) is not None:
                return distance.name
    return "distance unknown"
