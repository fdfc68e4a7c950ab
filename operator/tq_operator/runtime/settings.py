"""Settings of the operator process, from environment variables that the chart sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from tq_operator.plan.queue import Images
from transfer_queue.config.defaults import ETCD_IMAGE
from transfer_queue.config.resource import TlsMode
from transfer_queue.errors import ConfigError

__all__ = ["OperatorSettings", "WebhookSecret", "number"]


@dataclass(frozen=True)
class WebhookSecret:
    """Where the certificate of the webhook is, and who renews it."""

    namespace: str
    name: str
    operator: str
    """Name of the webhook's Service and configurations and of the operator's Deployment."""
    made: bool = True
    """Whether the operator makes and renews it."""
    bundles: bool = True
    """Whether the operator writes the CA into the bundles that the apiserver trusts."""
    converts: bool = False
    """Whether it also writes the CA into the bundles of the definitions."""
    life: timedelta = timedelta(days=365)

    @property
    def hosts(self) -> list[str]:
        """DNS names of the Service; the last one is what the apiserver calls."""
        return [self.operator, f"{self.operator}.{self.namespace}", f"{self.operator}.{self.namespace}.svc"]


@dataclass(frozen=True)
class OperatorSettings:
    """``resync`` in seconds. ``namespaces`` empty: all of them. Port 0: any free port."""

    images: Images
    namespaces: tuple[str, ...] = ()
    resync: float = 300.0
    webhook_port: int = 9443
    health_port: int = 8081
    certificates: Path = Path("/etc/transferqueue-webhook")
    """Folder of tls.crt and tls.key."""
    log_level: str = "INFO"
    identity: str = "local"
    """Name of this pod, for events and the election."""
    lease_namespace: str = ""
    """Where the Lease is; empty: no election, this is the only replica."""
    lease_name: str = "transferqueue-operator"
    default_tls: TlsMode = "off"
    """Of queues that say nothing of TLS."""
    webhook_secret: WebhookSecret | None = None
    """The Secret of ``certificates``; None if they are written by another program."""

    @property
    def release(self) -> str:
        """Name of the operator, over all its replicas; empty without an election."""
        return f"{self.lease_namespace}/{self.lease_name}" if self.lease_namespace else ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> OperatorSettings:
        """Raises ConfigError that names the variable."""
        missing = [name for name in ("TQ_IMAGE_SERVER", "TQ_IMAGE_MOONCAKE") if not environ.get(name)]
        if missing:
            raise ConfigError(f"set {' and '.join(missing)} to the images that queues run by default")
        images = Images(
            environ["TQ_IMAGE_SERVER"],
            environ["TQ_IMAGE_MOONCAKE"],
            environ.get("TQ_IMAGE_PULL_POLICY", "IfNotPresent"),
            environ.get("TQ_IMAGE_ETCD") or ETCD_IMAGE,
            environ.get("TQ_OPENSHIFT") != "true",
            ":" in environ.get("KUBERNETES_SERVICE_HOST", ""),
        )
        return cls(
            images=images,
            namespaces=tuple(
                name.strip() for name in environ.get("TQ_WATCH_NAMESPACES", "").split(",") if name.strip()
            ),
            resync=number(environ, "TQ_RESYNC_SECONDS", cls.resync),
            webhook_port=int(number(environ, "TQ_WEBHOOK_PORT", cls.webhook_port)),
            health_port=int(number(environ, "TQ_HEALTH_PORT", cls.health_port)),
            certificates=Path(environ.get("TQ_WEBHOOK_CERTIFICATES", str(cls.certificates))),
            log_level=environ.get("TQ_LOG_LEVEL", cls.log_level),
            identity=environ.get("POD_NAME", cls.identity),
            lease_namespace=environ.get("TQ_LEASE_NAMESPACE", ""),
            lease_name=environ.get("TQ_LEASE_NAME", cls.lease_name),
            default_tls=_tls(environ),
            webhook_secret=_webhook_secret(environ),
        )


def _webhook_secret(environ: Mapping[str, str]) -> WebhookSecret | None:
    if not (name := environ.get("TQ_WEBHOOK_SECRET")):
        return None
    return WebhookSecret(
        namespace=environ.get("TQ_LEASE_NAMESPACE", ""),
        name=name,
        operator=environ.get("TQ_WEBHOOK_NAME") or OperatorSettings.lease_name,
        made=environ.get("TQ_WEBHOOK_CERTIFICATE", "operator") == "operator",
        bundles=environ.get("TQ_WEBHOOK_BUNDLES", "true") == "true",
        converts=environ.get("TQ_CRD_CONVERSION") == "Webhook",
        life=timedelta(days=number(environ, "TQ_WEBHOOK_CERTIFICATE_DAYS", 365)),
    )


def _tls(environ: Mapping[str, str]) -> TlsMode:
    text = environ.get("TQ_DEFAULT_TLS") or "off"
    modes: dict[str, TlsMode] = {"operator": "operator", "off": "off"}
    if text not in modes:
        raise ConfigError(f'TQ_DEFAULT_TLS: "{text}" is neither operator nor off')
    return modes[text]


def number(environ: Mapping[str, str], name: str, default: float) -> float:
    """A variable as a number. Raises ConfigError."""
    text = environ.get(name, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise ConfigError(f'{name}: "{text}" is not a number') from None
