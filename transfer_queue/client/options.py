"""Options of a client, from the attach settings and the environment."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import Literal

from transfer_queue.client.arguments import check_seconds
from transfer_queue.config.attach import AttachConfig
from transfer_queue.config.variables import check_values
from transfer_queue.errors import ConfigError

__all__ = ["ClientOptions", "MissingFields", "in_ray", "missing_fields"]

MissingFields = Literal["error", "drop"]


@dataclass(frozen=True)
class ClientOptions:
    """Times are in seconds. ``layout`` and ``missing_fields``: see ``config.attach``. ``allow_pickle`` applies to
    writes, ``unpickle`` to reads."""

    layout: Literal["jagged", "dense"] = "jagged"
    missing_fields: MissingFields = "error"
    allow_pickle: bool = True
    unpickle: bool = True
    connect_s: float = 30.0
    request_s: float = 60.0
    """Time limit of a request, without intended waits."""
    fetch_s: float = 5.0
    """Time that ``get_meta`` waits for enough rows."""
    put_wait_s: float = 10.0
    """Time that a put waits for storage space and for the sample budget."""
    traces: Literal["no", "if installed", "yes"] = "no"
    """OpenTelemetry spans, see ``client.tracing``."""

    @classmethod
    def of(cls, config: AttachConfig) -> ClientOptions:
        """``TQ_LAYOUT`` and ``TQ_MISSING_FIELDS`` take precedence over the settings. Raises ConfigError for an invalid
        value of a variable."""
        check_values()
        return cls(
            layout=_layout(config.layout),
            missing_fields=missing_fields(config.missing_fields, compatible=in_ray()),
            allow_pickle=bool(config.security.allow_pickle),
            unpickle=bool(config.security.allow_pickle),
            connect_s=_seconds("TQ_CONNECT_TIMEOUT", cls.connect_s),
            request_s=_seconds("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", cls.request_s),
            # Two variables of 0.1.x that bound the same wait; the longer one was in effect.
            fetch_s=max(
                _seconds("TQ_CONTROLLER_GET_METADATA_TIMEOUT", 1.0),
                _seconds("TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL", cls.fetch_s),
            ),
            put_wait_s=_seconds("TQ_PUT_WAIT", cls.put_wait_s),
            traces=_traces(config.traces),
        )

    def decided(self, given: bool | None, queue: bool | None, authentic: bool) -> ClientOptions:
        """Decide whether values are pickled and unpickled. ``given``: the setting of this process; ``queue``: the
        setting of the queue; ``authentic``: whether the queue proved its identity. The queue can always forbid it, but
        allows it only if it is authentic."""
        if queue is False or given is False:
            return replace(self, allow_pickle=False, unpickle=False)
        return replace(self, allow_pickle=bool(given or queue), unpickle=bool(given or (queue and authentic)))


def _layout(default: Literal["jagged", "dense"]) -> Literal["jagged", "dense"]:
    text = os.environ.get("TQ_LAYOUT") or default
    if text not in ("jagged", "dense"):
        raise ConfigError(f"environment variable TQ_LAYOUT: {text!r} is not a layout; use jagged or dense")
    return "dense" if text == "dense" else "jagged"


def missing_fields(setting: MissingFields | None, *, compatible: bool) -> MissingFields:
    """``TQ_MISSING_FIELDS``, else the setting, else ``drop`` for a ``compatible`` program of 0.1.x or ``error``.

    Raises ConfigError.
    """
    text = os.environ.get("TQ_MISSING_FIELDS") or setting or ("drop" if compatible else "error")
    if text not in ("error", "drop"):
        raise ConfigError(f"environment variable TQ_MISSING_FIELDS: {text!r} is not a valid value; use error or drop")
    return "drop" if text == "drop" else "error"


def in_ray() -> bool:
    """Whether this program has initialized Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _traces(setting: bool | None) -> Literal["no", "if installed", "yes"]:
    """``TQ_TRACES``, else the setting, else whether the standard variables name where spans go."""
    text = os.environ.get("TQ_TRACES")
    if text:
        if text.lower() not in ("0", "1", "false", "true"):
            raise ConfigError(f"environment variable TQ_TRACES: {text!r} is not a switch; use 1 or 0")
        setting = text.lower() in ("1", "true")
    if setting is not None:
        return "yes" if setting else "no"
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return "no"
    names = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return "if installed" if any(os.environ.get(name) for name in names) else "no"


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name)
    if not text:
        return default
    try:
        return check_seconds(name, float(text))
    except ValueError:  # InvalidInputError too
        raise ConfigError(f"environment variable {name}: {text!r} is not a number of seconds from 0 on") from None
