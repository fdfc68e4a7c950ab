"""The certificate of the webhook, and the trust of the apiserver in it.

The certificate is in a Secret, which the operator or an administrator makes and renews. Every replica reads it from the
apiserver. The apiserver trusts the bundles (``caBundle``) of the webhook configurations and of the definitions that the
operator converts. A new CA first joins the old one in the bundles. Then the replicas serve a certificate of the new CA,
and the old CA leaves the bundles when no replica can serve a certificate of it any more.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from kubernetes.dynamic.exceptions import ConflictError, NotFoundError

from tq_operator.api.crd import custom_resource_definitions
from tq_operator.plan.names import MANAGER
from tq_operator.plan.queue import Manifest
from tq_operator.runtime.certificates import AUTHORITY_LIFE, KEYS, is_good, secret_data
from tq_operator.runtime.cluster import Cluster, ClusterError
from tq_operator.runtime.settings import WebhookSecret
from transfer_queue.launch.certificates import KeyPair, is_due, issue, new_authority, server_names

__all__ = ["Trust", "bundle", "renewed"]

logger = logging.getLogger("tq_operator.trust")

_LOOK_S = 2.0
_SETTLE_S = 3.0
"""Time until every apiserver has seen a changed bundle."""
_OVERLAP_S = 3600.0
"""Much longer than a replica needs to read a new certificate, or an update of older replicas takes."""
_DEFINITIONS_S = 30.0
"""Interval between reads of the definitions, which are large."""


def renewed(
    data: Mapping[str, bytes], name: str, hosts: Sequence[str], life: timedelta, now: datetime
) -> dict[str, bytes] | None:
    """Return the content of the Secret with missing, damaged or expiring parts replaced, or None if there are none.

    Args:
        data: The present content: ca.crt, ca.key, tls.crt, tls.key.
        name: Name of the operator, from which the name of the CA is made.
        hosts: DNS names of the webhook's Service.
        life: Lifetime of a certificate.
        now: The current time.
    """
    names = server_names(hosts)
    authority = KeyPair(data.get("ca.crt", b""), data.get("ca.key", b""))
    try:
        if is_due(authority.certificate, now):
            raise ValueError("the authority ends soon")
        if is_good(data, authority, names, now):
            return None
        made = issue(authority, hosts[-1], names, now, life, server=True)
    except (ValueError, TypeError):
        authority = new_authority(f"{name}-ca", now, AUTHORITY_LIFE)
        made = issue(authority, hosts[-1], names, now, life, server=True)
    pairs = {"ca": authority, "tls": made}
    return {f"{part}.{suffix}": value for part, pair in pairs.items() for suffix, value in _files(pair)}


def _files(pair: KeyPair) -> Iterator[tuple[str, bytes]]:
    yield "crt", pair.certificate
    yield "key", pair.key


def bundle(found: bytes, needed: bytes, *, keep: bool) -> bytes:
    """Return the certificates that the apiserver trusts as PEM: ``needed``, and with ``keep`` all others of ``found``.

    The result is ``found`` itself if nothing has to change. Raises ValueError if ``needed`` holds no certificate.
    """
    wanted = x509.load_pem_x509_certificates(needed)
    try:
        there = x509.load_pem_x509_certificates(found) if found else []
    except ValueError:
        there = []
    others = [each for each in there if each not in wanted] if keep else []
    if set(there) == {*wanted, *others}:
        return found
    return b"".join(each.public_bytes(Encoding.PEM) for each in (*wanted, *others))


class Trust:
    """Keeps the files that the webhook serves and the bundles up to date with the Secret. Calls block."""

    def __init__(
        self,
        cluster: Cluster,
        secret: WebhookSecret,
        folder: Path,
        leading: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``leading``: whether this replica writes; ``clock``: seconds from any moment on."""
        self._cluster = cluster
        self._clock = clock
        self._secret = secret
        self._folder = folder
        self._leading = leading
        self._path = f"/api/v1/namespaces/{secret.namespace}/secrets"
        self._authority = b""
        """ca.crt of the Secret."""
        self._since = 0.0
        """When the bundles were first seen with this CA."""
        self._definitions_read = clock() - _DEFINITIONS_S
        self._served: dict[str, bytes] = {}

    @property
    def served(self) -> bool:
        """Whether there is a certificate to serve."""
        return bool(self._served)

    def look(self, now: datetime) -> None:
        """Update Secret, bundles and files. Raises ClusterError, ConflictError, NotFoundError, ValueError."""
        content = self._content(now)
        authority = content.get("ca.crt", b"")
        if authority != self._authority:
            self._spread(authority, keep=True)
            self._authority, self._since = authority, self._clock()
        elif self._leading():
            self._spread(authority, keep=self._clock() - self._since < _OVERLAP_S)
        same = not self._secret.bundles or authority == self._served.get("ca.crt")
        if content != self._served and (same or self._clock() - self._since >= _SETTLE_S):
            self._write(content)
            self._served = content

    def _content(self, now: datetime) -> dict[str, bytes]:
        secret, place = self._secret, f"{self._path}/{self._secret.name}"
        try:
            found = self._cluster.call("GET", place)
        except NotFoundError:
            if not secret.made:
                words = "does not exist; create it, or see webhook.certificate of the chart"
                raise ValueError(f"Secret {secret.namespace}/{secret.name} {words}") from None
            found = {}
        content = secret_data(found)
        if secret.made:
            fresh = renewed(content, secret.operator, secret.hosts, secret.life, now)
            # At the start any replica makes the first certificate; a second replica gets a conflict.
            if fresh and (self._leading() or not self._served):
                data = {key: base64.b64encode(value).decode() for key, value in fresh.items()}
                if found:
                    self._cluster.call("PUT", place, {**found, "data": data})
                else:
                    self._cluster.call("POST", self._path, {**self._manifest(), "data": data})
                logger.info("made a new certificate for the webhook")
                content = fresh
        needed = KEYS if secret.bundles else KEYS[1:]
        if missing := [key for key in needed if key not in content]:
            raise ValueError(f"Secret {secret.namespace}/{secret.name} has no {' and no '.join(missing)}; add it")
        return content

    def _manifest(self) -> Manifest:
        secret = self._secret
        metadata: Manifest = {
            "name": secret.name,
            "namespace": secret.namespace,
            "labels": {"app.kubernetes.io/name": MANAGER, "app.kubernetes.io/managed-by": MANAGER},
        }
        try:
            path = f"/apis/apps/v1/namespaces/{secret.namespace}/deployments/{secret.operator}"
            uid = self._cluster.call("GET", path)["metadata"]["uid"]
        except NotFoundError:  # not installed by the chart
            pass
        else:
            owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": secret.operator, "uid": uid}
            metadata["ownerReferences"] = [owner]
        return {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": metadata}

    def _spread(self, authority: bytes, *, keep: bool) -> None:
        """Write ``authority`` into every bundle; with ``keep``, beside the certificates that it holds."""
        if not self._secret.bundles:
            return
        for kind in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations"):
            self._repair(f"/apis/admissionregistration.k8s.io/v1/{kind}/{self._secret.operator}", authority, keep)
        changed = authority != self._authority
        if self._secret.converts and (changed or self._clock() - self._definitions_read >= _DEFINITIONS_S):
            for name, definition in custom_resource_definitions().items():
                path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
                self._repair(f"{path}/{name}.{definition['spec']['group']}", authority, keep)
            self._definitions_read = self._clock()

    def _repair(self, path: str, authority: bytes, keep: bool) -> None:
        try:
            found = self._cluster.call("GET", path)
        except NotFoundError:  # not installed, or not yet
            return
        operations: list[Manifest] = []
        for pointer, settings in _clients(found):
            there = settings.get("caBundle", "")
            wanted = base64.b64encode(bundle(_decoded(there), authority, keep=keep)).decode()
            if wanted != there:
                operations.append({"op": "add", "path": f"{pointer}/caBundle", "value": wanted})
        if operations:
            unchanged = {
                "op": "test",
                "path": "/metadata/resourceVersion",
                "value": found["metadata"]["resourceVersion"],
            }
            query = [("fieldManager", MANAGER)]
            self._cluster.call("PATCH", path, [unchanged, *operations], query, "application/json-patch+json")
            logger.info("%s: the bundle holds the CA of the webhook", path.rsplit("/", 1)[1])

    def _write(self, content: Mapping[str, bytes]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in ("tls.key", "tls.crt"):
            written = self._folder / f".{name}"
            written.touch(mode=0o600)
            written.write_bytes(content[name])
            written.replace(self._folder / name)

    async def start(self) -> None:
        """Wait until there is a certificate to serve that the apiserver trusts."""
        while not self.served:
            await self._try()
            if not self.served:
                await asyncio.sleep(_LOOK_S / 4)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._try()

    async def _try(self) -> None:
        try:
            await asyncio.to_thread(self.look, datetime.now(timezone.utc))
        except ConflictError:
            return  # another replica was first: the next look finds its changes
        except (ClusterError, NotFoundError, ValueError) as error:
            logger.warning("cannot renew the certificate of the webhook: %s", error)


def _clients(document: Manifest) -> Iterator[tuple[str, Manifest]]:
    """JSON pointer of each clientConfig of a webhook configuration or definition, and the clientConfig."""
    for number, hook in enumerate(document.get("webhooks", [])):
        yield f"/webhooks/{number}/clientConfig", hook["clientConfig"]
    settings: Any = document.get("spec", {}).get("conversion", {}).get("webhook", {}).get("clientConfig")
    if settings:
        yield "/spec/conversion/webhook/clientConfig", settings


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text)
    except ValueError:
        return b""
