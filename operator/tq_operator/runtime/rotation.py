"""A new webhook certificate before the old one ends, signed by the same authority: what the apiserver trusts stays."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from kubernetes.dynamic.exceptions import ConflictError, NotFoundError

from tq_operator.plan.queue import Manifest
from tq_operator.runtime.cluster import Cluster, ClusterError

__all__ = ["renewed", "rotate"]

logger = logging.getLogger("tq_operator.rotation")

_LOOK_S = 600.0
_CLOCK_SKEW = timedelta(minutes=5)


def renewed(secret: Manifest, now: datetime) -> Manifest | None:
    """The Secret with a new tls.crt and tls.key if less than a third of the old one's life is left; else None.

    Raises ValueError if the Secret is not as the chart made it.
    """
    data = {name: base64.b64decode(text) for name, text in secret.get("data", {}).items()}
    for name in ("ca.crt", "ca.key", "tls.crt"):
        if name not in data:
            raise ValueError(f"the Secret has no {name}; delete it and upgrade the chart to have it made anew")
    old = x509.load_pem_x509_certificate(data["tls.crt"])
    life = old.not_valid_after_utc - old.not_valid_before_utc
    if old.not_valid_after_utc - now > life / 3:
        return None
    authority = x509.load_pem_x509_certificate(data["ca.crt"])
    if authority.not_valid_after_utc <= now:
        raise ValueError("the authority in ca.crt has ended; delete the Secret and upgrade the chart")
    signer = serialization.load_pem_private_key(data["ca.key"], None)
    if not isinstance(signer, (rsa.RSAPrivateKey, ec.EllipticCurvePrivateKey)):
        raise ValueError("ca.key is neither an RSA nor an elliptic curve key")  # noqa: TRY004
    key = ec.generate_private_key(ec.SECP256R1())
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    made = (
        x509.CertificateBuilder()
        .subject_name(old.subject)
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(min(now + life, authority.not_valid_after_utc))
        .add_extension(names, critical=False)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    fresh = {"tls.crt": made.public_bytes(serialization.Encoding.PEM), "tls.key": private}
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
