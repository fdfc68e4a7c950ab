"""Settings of a program that attaches to a running queue: the file named by ``TQ_CONFIG_FILE``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from transfer_queue._printable import printable
from transfer_queue.config.document import Document, TerseDocument, load_document, read_yaml, validate_document
from transfer_queue.config.security import PeerSecurity
from transfer_queue.errors import ConfigError

__all__ = [
    "AttachConfig",
    "AttachSecurity",
    "ControllerAddresses",
    "Target",
    "attach_from_environment",
    "join_address",
    "parse_address",
]


class ControllerAddresses(Document):
    """Addresses of the controller, ``host:port`` each; IPv6 hosts in brackets."""

    addresses: list[str] = Field(min_length=1)


class AttachSecurity(PeerSecurity):
    """``allow_pickle``: whether writers pickle and readers unpickle values that msgpack cannot carry. None: the setting
    of the queue, if it proves its identity. A queue that forbids it always takes precedence."""

    allow_pickle: bool | None = None


@dataclass(frozen=True)
class Target:
    """The expected queue. None: any. ``origin``: the setting that names it. ``folder``: where its files are."""

    name: str | None = None
    uid: str | None = None
    origin: str = ""
    folder: str = ""

    @property
    def gone(self) -> str:
        """Why the queue has ended, if its folder is gone, as after ``close()`` of the program that started it."""
        if not self.folder or os.path.isdir(self.folder):
            return ""
        return f"queue {self.name or 'of this program'} ended: its folder {self.folder} is gone"

    def mismatch(self, name: str, uid: str | None, address: str) -> str | None:
        """Return why the queue at ``address`` is not the expected queue; None if it is."""
        found = name if name != (self.name or name) else f"{name} with uid {uid}"
        if self.name not in (None, name):
            meant = f"queue {self.name}"
        elif self.uid is not None and uid is not None and self.uid != uid:
            meant = f"queue {self.name or name} with uid {self.uid}"
        else:
            return None
        return (
            f"the controller at {address} serves queue {printable(found)}, but {self.origin or 'this program'} "
            f"expects {meant}, which has ended or moved; start it again, or attach to the queue that you want"
        )


class AttachConfig(TerseDocument):
    """Addresses of a queue. Everything else (backend, its settings, units) comes from the controller, which is refused
    if its queue has another ``name`` or ``uid``.

    ``layout``: how fields of two or more dimensions come back. ``missing_fields``: how a get by key treats a named
    field that some of the rows lack: ``error`` refuses it, ``drop`` leaves it out as in 0.1.x; None: ``drop`` where
    Ray is initialized, as in every program of 0.1.x, otherwise ``error``. ``traces``: whether to write OpenTelemetry
    spans; None: if the environment asks for them.
    """

    name: str | None = None
    uid: str | None = None
    controller: ControllerAddresses
    layout: Literal["jagged", "dense"] = "jagged"
    missing_fields: Literal["error", "drop"] | None = None
    traces: bool | None = None
    security: AttachSecurity = AttachSecurity()
    _origin: str = PrivateAttr(default="")
    _folder: str = PrivateAttr(default="")

    def found_in(self, origin: str, *, folder: str = "") -> AttachConfig:
        """Set the ``origin`` that errors name, and the ``folder`` of the queue; return the same settings."""
        self._origin, self._folder = origin, folder
        return self

    @property
    def identity(self) -> str:
        """What tells the queue from others: its uid, or else its name and addresses."""
        return self.uid or f"{self.name or 'queue'} at {','.join(self.controller.addresses)}"

    @property
    def target(self) -> Target:
        """The expected queue."""
        return Target(self.name, self.uid, self._origin, self._folder)


def attach_from_environment(environ: Mapping[str, str] | None = None) -> AttachConfig | None:
    """The attach settings named by ``TQ_CONFIG_FILE``, else by ``TQ_CONTROLLER_ADDRESS`` (comma-separated), else None.

    Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    if path := environ.get("TQ_CONFIG_FILE"):
        if not os.path.exists(path):
            raise ConfigError(
                f"TQ_CONFIG_FILE={path}: there is no such file; the queue that made it has ended or never started: "
                "start it and set the variable to its file, or unset it"
            )
        folder = os.path.dirname(os.path.abspath(path))
        return _load_attach(path).found_in(f"TQ_CONFIG_FILE={path}", folder=folder)
    if addresses := environ.get("TQ_CONTROLLER_ADDRESS"):
        listed = [item.strip() for item in addresses.split(",") if item.strip()]
        for item in listed:
            try:
                parse_address(item)
            except ConfigError as error:
                raise ConfigError(f"environment variable TQ_CONTROLLER_ADDRESS: {error}") from None
        named = {
            "name": environ.get("TQ_QUEUE_NAME") or None,
            "uid": environ.get("TQ_QUEUE_UID") or None,
            "controller": {"addresses": listed},
            "security": _security_from(environ),
        }
        found = validate_document(AttachConfig, named, "TQ_CONTROLLER_ADDRESS")
        return found.found_in(f"TQ_CONTROLLER_ADDRESS={addresses}")
    return None


def _load_attach(path: str) -> AttachConfig:
    """The attach file of ``TQ_CONFIG_FILE``. Raises ConfigError."""
    try:
        found = read_yaml(Path(path), "mapping of settings").value
        if isinstance(found, dict) and "apiVersion" in found and "kind" in found:
            raise ConfigError(
                f"{path}: this is a {printable(str(found['kind']))} resource: start it by tq up -f {path}; "
                "TQ_CONFIG_FILE takes the attach file, which tq status shows"
            )
        return load_document(AttachConfig, path)
    except ConfigError as error:
        raise ConfigError(f"environment variable TQ_CONFIG_FILE: {error}") from None


def _security_from(environ: Mapping[str, str]) -> dict[str, Any]:
    """``TQ_TLS_CA``, ``TQ_TLS_CERTIFICATE``, ``TQ_TLS_KEY``, ``TQ_TLS_SERVER_NAME`` and ``TQ_TOKEN_FILE``.

    Raises ConfigError for a file that cannot be read.
    """
    names = {
        "ca": "TQ_TLS_CA",
        "certificate": "TQ_TLS_CERTIFICATE",
        "key": "TQ_TLS_KEY",
        "server_name": "TQ_TLS_SERVER_NAME",
    }
    for name in ("TQ_TLS_CA", "TQ_TLS_CERTIFICATE", "TQ_TLS_KEY", "TQ_TOKEN_FILE"):
        try:
            if path := environ.get(name):
                Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"environment variable {name}: {path}: cannot be read: {error.strerror}") from None
    tls = {field: environ[name] for field, name in names.items() if environ.get(name)}
    return {"tls": tls or None, "token_file": environ.get("TQ_TOKEN_FILE") or None}


def parse_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` -> (host, port). Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if "/" in address:
        raise ConfigError(f"{address!r} is not an address: write host:port, without a scheme such as http:// or a path")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is not an address; write host:port, for example tq-controller:50060")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """(host, port) -> ``host:port``, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
