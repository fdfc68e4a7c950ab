"""A ``mooncake_master`` as a child process: ports checked first, readiness awaited, never left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from transfer_queue.config.attach import join_address
from transfer_queue.errors import ConfigError, StartError
from transfer_queue.storage.mooncake import engine, guard
from transfer_queue.storage.mooncake.admin import Admin
from transfer_queue.storage.mooncake.loopback import is_loopback
from transfer_queue.storage.mooncake.settings import MasterSettings

__all__ = ["MasterEndpoints", "MasterProcess"]

_POLL_S = 0.02
_LOG_LINES = 3
_LOG_PREFIX = re.compile(r"^(?:\x1b\[\S*)*([IWEF])\d{4} [\d:.]+ +\d+ [\w./]+:\d+\] ")


@dataclass(frozen=True)
class MasterEndpoints:
    """Values of the MooncakeSettings fields of the same names."""

    master_server_address: str
    metadata_server: str
    admin_address: str

    def settings(self) -> dict[str, object]:
        """The endpoints as settings of the backend. The master was started with eviction disabled."""
        return {
            "masterServerAddress": self.master_server_address,
            "metadataServer": self.metadata_server,
            "adminAddress": self.admin_address,
            "evictionDisabled": True,
        }


class MasterProcess:
    """Runs one master; its output goes to ``log_path``. Blocking: call ``start`` off an event loop.

    The master ends when this process ends, however that happens.
    """

    def __init__(self, settings: MasterSettings, log_path: str | Path, *, binary: str | None = None) -> None:
        self._settings = settings
        self._log = Path(log_path)
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> MasterEndpoints:
        """Start the master and wait until it serves.

        Raises StartError in one line: a port in use, a missing library, the last words of a master that died.
        """
        if self._process is not None:
            raise StartError("this Mooncake master was already started")
        binary = self._binary or engine.find_master()
        host = _interface_address(self._settings.rpc_interface) or self._settings.host
        rpc, metrics, *metadata = self._choose_ports(host)
        flags: dict[str, object] = {
            "rpc_address": host,
            "rpc_port": rpc,
            "metrics_host": host,
            "metrics_port": metrics,
            # Unread data must never be evicted: a full store refuses puts instead.
            "eviction_high_watermark_ratio": 1,
            "eviction_ratio": 0,
            "default_kv_lease_ttl": self._settings.lease_ttl_ms,
            "client_ttl": self._settings.client_ttl,
            # Space of a writer that died while it was writing.
            "put_start_discard_timeout_sec": 30,
            "put_start_release_timeout_sec": 60,
        }
        metadata_server = "P2PHANDSHAKE"
        for port in metadata:
            metadata_server = f"http://{join_address(host, port)}/metadata"
            flags |= {
                "enable_http_metadata_server": "true",
                "http_metadata_server_host": host,
                "http_metadata_server_port": port,
            }
        self._launch(binary, flags)
        try:
            self._await_ready(Admin(join_address(host, metrics), timeout_s=1.0), {rpc, metrics, *metadata})
        except BaseException:
            self.stop()
            raise
        return MasterEndpoints(join_address(host, rpc), metadata_server, join_address(host, metrics))

    def poll(self) -> int | None:
        """Exit status of a master that ended by itself, else None."""
        return self._process.poll() if self._process else None

    def exposed(self) -> list[str]:
        """host:port at which the master listens to other machines despite its settings, as old masters do."""
        listening = sorted(_listening(self._process.pid)) if self._process else []
        return [join_address(host, port) for host, port in listening if not is_loopback(host)]

    def failure(self) -> str | None:
        """Reason why the master has ended, in one line; None while it runs."""
        status = self.poll()
        if status is None:
            return None
        return f"mooncake_master ended ({_describe(status)}): {self.log_tail()}".removesuffix(": ")

    def stop(self, grace_s: float = 5.0) -> None:
        """End the master and wait for it. Idempotent."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._guard is not None:
            self._guard.wait()  # it ends by itself once the master has ended
            self._guard = None

    def log_tail(self) -> str:
        """The last lines of the log that tell most, joined into one line."""
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        severe = [line for line in lines if (match := _LOG_PREFIX.match(line)) is None or match[1] in "EF"]
        chosen = [_LOG_PREFIX.sub("", line).strip() for line in (severe or lines)]
        chosen = [line for line in chosen if line and not line.startswith(("***", "@", "WARNING: Logging before"))]
        return "; ".join(chosen[-_LOG_LINES:])

    def _launch(self, binary: str, flags: dict[str, object]) -> None:
        known = _known_flags(binary, self._settings.start_timeout)
        arguments = [f"--{name}={value}" for name, value in flags.items() if name in known]
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            start_new_session=True,  # what kills this process's whole group must not end the guard before the master
        )
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [binary, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a Ctrl-C is for the owner, which stops things in order
                )
        except OSError as error:
            raise StartError(f"mooncake_master cannot be started: {error}") from None
        finally:
            assert self._guard.stdin is not None
            self._guard.stdin.write(b"%d\n" % self._process.pid if self._process else b"\n")
            self._guard.stdin.close()

    def _await_ready(self, admin: Admin, ports: set[int]) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._settings.start_timeout
        while True:
            status = self._process.poll()
            if status is not None:
                raise StartError(f"mooncake_master ended at once ({_describe(status)}): {self.log_tail()}")
            # It reports itself ready even if its RPC port is taken, and some versions run on without their HTTP
            # ports: only the sockets tell.
            if ports <= {port for _, port in _listening(self._process.pid)} and admin.ready():
                return
            if time.monotonic() > deadline:
                raise StartError(
                    f"mooncake_master was not ready within {self._settings.start_timeout:g} s: {self.log_tail()}"
                )
            time.sleep(_POLL_S)

    def _choose_ports(self, host: str) -> list[int]:
        wanted = {
            "rpcPort": self._settings.rpc_port,
            "metricsPort": self._settings.metrics_port,
        }
        # The master's metadata server knows IPv4 alone; without it peers ask each other.
        if self._settings.http_metadata_port is not None and ":" not in host:
            wanted["httpMetadataPort"] = self._settings.http_metadata_port
        sockets: list[socket.socket] = []  # all held until all are chosen, so that free ones are distinct
        try:
            for name, port in wanted.items():
                sockets.append(_bind(host, port, name))
            return [int(each.getsockname()[1]) for each in sockets]
        finally:
            for each in sockets:
                each.close()


def _bind(host: str, port: int, setting: str) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the master does: TIME_WAIT is not "in use"
    try:
        # Old masters and the metadata server listen on all addresses, regardless of their settings.
        bound.bind(("" if setting != "rpcPort" else host, port))
        bound.listen()
    except OSError as error:
        bound.close()
        raise StartError(
            f"port {port} on {host} cannot be used for the Mooncake master ({error.strerror}): "
            f"stop what uses it or set another master.{setting}"
        ) from None
    return bound


def _interface_address(name: str | None) -> str | None:
    if name is None:
        return None
    addresses = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in addresses.get(name, []):
            if address.family == family and not address.address.startswith("fe80:"):
                return str(address.address)
    raise ConfigError(f"master.rpcInterface: {name!r} has no address; interfaces: {', '.join(sorted(addresses))}")


def _known_flags(binary: str, timeout_s: float) -> set[str]:
    """Flags this version knows; it refuses to start with an unknown one."""
    try:
        shown = subprocess.run([binary, "--help"], capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise StartError(f"mooncake_master did not say within {timeout_s:g} s which flags it knows") from None
    except OSError as error:
        raise StartError(f"mooncake_master cannot be started: {error}") from None
    flags = set(re.findall(r"^\s+-(\w+) \(", shown.stdout, re.MULTILINE))
    if not flags:
        text = shown.stderr or shown.stdout
        reason = engine.explain_load_error(text, "mooncake_master")
        raise StartError(reason or f"mooncake_master cannot be started: {' '.join(text.split())[-300:]}")
    return flags


def _listening(pid: int) -> set[tuple[str, int]]:
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return set()
    return {(str(each.laddr.ip), int(each.laddr.port)) for each in connections if each.status == psutil.CONN_LISTEN}


def _describe(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
