"""A new webhook certificate before the old one ends, signed by the same authority: what the apiserver trusts stays."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable
from datetime import datetime, timezone

from cryptography import x509
from kubernetes.dynamic.exceptions import ConflictError, NotFoundError

from tq_operator.plan.queue import Manifest
from tq_operator.runtime.cluster import Cluster, ClusterError
from transfer_queue.launch.certificates import KeyPair, is_due, sign

__all__ = ["renewed", "rotate"]

logger = logging.getLogger("tq_operator.rotation")

_LOOK_S = 600.0


def renewed(secret: Manifest, now: datetime) -> Manifest | None:
    """The Secret with a new tls.crt and tls.key if less than a third of the old one's life is left; else None.

    Raises ValueError if the Secret is not as the chart made it.
    """
    data = {name: base64.b64decode(text) for name, text in secret.get("data", {}).items()}
    for name in ("ca.crt", "ca.key", "tls.crt"):
        if name not in data:
            raise ValueError(f"the Secret has no {name}; delete it and upgrade the chart to have it made anew")
    if not is_due(data["tls.crt"], now):
        return None
    old = x509.load_pem_x509_certificate(data["tls.crt"])
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    life, uses = old.not_valid_after_utc - old.not_valid_before_utc, [x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]
    try:
        made = sign(KeyPair(data["ca.crt"], data["ca.key"]), old.subject, names, uses, now, life)
    except ValueError as error:
        raise ValueError(f"{error}; delete the Secret and upgrade the chart") from None
    fresh = {"tls.crt": made.certificate, "tls.key": made.key}
    return {**secret, "data": {**secret["data"], **{k: base64.b64encode(v).decode() for k, v in fresh.items()}}}


async def rotate(cluster: Cluster, namespace: str, name: str, leading: Callable[[], bool]) -> None:
    """Look after the Secret ``namespace/name`` until cancelled; the kubelet brings a new one to every replica."""
    path = f"/api/v1/namespaces/{namespace}/secrets/{name}"

    def look() -> None:
        secret = cluster.call("GET", path)
        if (fresh := renewed(secret, datetime.now(timezone.utc))) is not None and leading():
            cluster.call("PUT", path, fresh)
            logger.info("made a new certificate for the webhook")

    while True:
        if leading():
            try:
                await asyncio.to_thread(look)
            except (ClusterError, NotFoundError, ConflictError, ValueError) as error:
                logger.warning("the certificate in Secret %s/%s is not looked after: %s", namespace, name, error)
        await asyncio.sleep(_LOOK_S if leading() else 5.0)
