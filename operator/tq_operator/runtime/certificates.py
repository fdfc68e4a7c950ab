"""Certificates in Secrets: one for the servers of a queue, one for its pods in each namespace.

They are of an issuer of cert-manager, which looks after them, or of a CA that the queue alone has. Then they are made
when the queue is looked at, and again when a third of their life is left. The kubelet brings new ones to the pods,
whose processes read them with the next connection. The CA's key is in a Secret that no pod mounts.

A new CA is first added to the bundle that all pods trust. Once every Secret has that bundle, and the kubelet had time
to bring it to the pods, certificates of the new CA replace those of the old one. An hour later the old CA is removed.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from tq_operator.plan.difference import differs, foreign_owner, stamped
from tq_operator.plan.issued import ISSUED, client_certificate, server_certificate, server_hosts, why_not_issued
from tq_operator.plan.names import QUEUE_ANNOTATION, QUEUE_LABEL, labels
from tq_operator.plan.pods import manifest
from tq_operator.plan.problems import Problem, refusal
from tq_operator.plan.queue import Manifest, Queue
from tq_operator.plan.settings import TOKENS_KEY
from tq_operator.plan.step import PAUSE
from tq_operator.runtime.cluster import Cluster, ClusterError
from transfer_queue.config.defaults import GROUP
from transfer_queue.config.security import namespace_name
from transfer_queue.launch.certificates import (
    KeyPair,
    client_names,
    is_due,
    issue,
    issued_by,
    new_authority,
    server_names,
)

__all__ = ["AUTHORITY_LIFE", "CERTIFICATE_LIFE", "KEYS", "Certificates", "is_good", "queue_of_secret", "secret_data"]

AUTHORITY_LIFE = timedelta(days=3650)
CERTIFICATE_LIFE = timedelta(days=90)
_SPREAD = timedelta(minutes=3)
"""Much longer than the kubelet needs to bring a changed Secret to its pods."""
_OVERLAP = timedelta(hours=1)
_ADDED = f"{GROUP}/ca-changed"
"""On Secrets with a certificate: when a new CA was added to their bundle."""
_ISSUED = f"{GROUP}/ca-issued"
"""On Secrets whose bundle has an old CA: when they got a certificate of the new one."""
_CLIENT = "tls-client"
KEYS = ("ca.crt", "tls.crt", "tls.key")
"""Of a Secret with a certificate: its CA, itself, its key."""


@dataclass(frozen=True)
class _Trust:
    """The CA of a queue, and those that it replaces."""

    authority: KeyPair
    old: tuple[bytes, ...] = ()
    """Certificates of CAs that are still trusted."""
    spreads: bool = False
    """Whether pods may not trust the new CA yet, so that certificates of the old ones stay."""
    added: datetime | None = None
    """When the last Secret got the bundle with the new CA."""
    issued: datetime | None = None
    """When the last Secret got a certificate of the new CA."""

    @property
    def bundle(self) -> bytes:
        return b"".join((self.authority.certificate, *self.old))

    def accepts(self, data: Mapping[str, bytes], names: x509.SubjectAlternativeName, now: datetime) -> bool:
        """Whether a Secret holds a certificate that may stay."""
        issuers = (self.authority.certificate, *(self.old if self.spreads else ()))
        return any(is_good({**data, "ca.crt": each}, KeyPair(each, b""), names, now) for each in issuers)


class Certificates:
    """Looks after the Secrets of queues. Blocking."""

    def __init__(self, cluster: Cluster, namespaces: tuple[str, ...], may_write: Callable[[], None]) -> None:
        """``may_write`` raises ClusterError if this replica may not."""
        self._cluster = cluster
        self._namespaces = namespaces
        self._may_write = may_write

    def look_after(self, queue: Queue, users: Iterable[str], now: datetime) -> list[Problem]:
        """Make what is missing or due. ``users``: namespaces with pods that were given the queue.

        Gives what went wrong, and what is wrong with Secrets that the queue names.
        """
        problems = self._given_secrets(queue, now)
        if queue.annotations.get(PAUSE) == "true":
            return problems
        # Anybody can make a pod that looks as if it had been given the queue.
        namespaces = sorted({queue.namespace, *filter(queue.admits, users)})
        if queue.tls == "issuer":
            wanted = [server_certificate(queue), *(client_certificate(queue, name) for name in namespaces)]
            return [*problems, *filter(None, map(self._order, wanted))]
        if queue.tls != "operator":
            return problems
        wanted_secrets = [(self._own(queue, "tls-server"), server_names(server_hosts(queue)), True)]
        for namespace in namespaces:
            secret = self._own(queue, _CLIENT) if namespace == queue.namespace else _foreign(queue, namespace)
            wanted_secrets.append((secret, client_names(namespace_name(namespace)), False))
        try:
            trust = self._trust(queue, self._authority(queue, now), [secret for secret, *_ in wanted_secrets], now)
        except ClusterError as error:
            return [*problems, refusal("the Secret of the CA", str(error), "CertificateNotMade")]
        except _UnusableError as error:
            return [*problems, Problem("CertificateNotMade", str(error))]
        for secret, names, server in wanted_secrets:
            try:
                self._keep(queue, secret, trust, names, now, server=server)
            except _UnusableError as error:
                problems.append(Problem("CertificateNotMade", str(error)))
            except ClusterError as error:
                what = "Secret {namespace}/{name}".format(**secret["metadata"])
                if not _is_ending(error):  # pods of a namespace that is being deleted need none any more
                    problems.append(refusal(what, str(error), "CertificateNotMade"))
        return problems

    def users_left(self) -> set[tuple[str, str]]:
        """Queues, by namespace and name, with something that Kubernetes does not delete with them."""
        return {key for found in self._left_behind(None) if (key := _key_of(found)) is not None}

    def forget(self, namespace: str, name: str) -> None:
        """Delete what a queue that is gone left: Secrets in other namespaces, and those of cert-manager."""
        for found in self._left_behind(name):
            if _key_of(found) == (namespace, name):
                self._may_write()
                self._cluster.delete(found)

    def _left_behind(self, queue: str | None) -> list[Manifest]:
        """Of queues of that name in any namespace; None: of all queues."""
        # Certificates first: cert-manager makes the Secret of one again.
        kinds = (("Certificate", ISSUED), ("Secret", ISSUED), ("Secret", _CLIENT))
        found = []
        for kind, part in kinds:
            chosen = labels(queue or "", part)
            if queue is None:
                del chosen[QUEUE_LABEL]
            found += self._cluster.labelled(kind, self._namespaces, chosen)
        return found

    def _order(self, certificate: Manifest) -> Problem | None:
        """Have cert-manager make a certificate. Gives why there is none."""
        wanted, where = stamped(certificate), "{namespace}/{name}".format(**certificate["metadata"])
        try:
            found = self._cluster.child(wanted)
            if found is not None and _key_of(found) != _key_of(wanted):
                words = f"Certificate {where} exists and belongs to something else; delete it or rename the queue"
                return Problem("CertificateNotMade", words)
            if differs(wanted, found):
                self._may_write()
                found = self._cluster.apply(wanted, found)
        except ClusterError as error:
            if _is_ending(error):
                return None
            words = f"{error}; tls.mode issuer needs cert-manager, and the operator the right to its Certificates"
            return refusal(f"Certificate {where}", words, "CertificateNotMade")
        words = why_not_issued(found or {})
        return Problem("CertificateNotMade", f"Certificate {where}: cert-manager says: {words}") if words else None

    def _authority(self, queue: Queue, now: datetime) -> KeyPair:
        wanted = self._own(queue, "tls-ca")
        found = self._found(queue, wanted)
        data = secret_data(found) if found is not None else {}
        pair = KeyPair(data.get("ca.crt", b""), data.get("ca.key", b""))
        if _signs(pair, now):
            return pair
        made = new_authority(f"TransferQueue {queue.namespace}/{queue.name}", now, AUTHORITY_LIFE)
        self._write({**wanted, "type": "Opaque"}, {"ca.crt": made.certificate, "ca.key": made.key}, found)
        return made

    def _trust(self, queue: Queue, authority: KeyPair, secrets: Iterable[Manifest], now: datetime) -> _Trust:
        """By the Secret of the servers, which has the CAs that are trusted now, and how far all ``secrets`` are."""
        found = self._found(queue, self._own(queue, "tls-server"))
        text = secret_data(found).get("ca.crt", b"") if found else b""
        new = x509.load_pem_x509_certificates(authority.certificate)
        try:
            there = x509.load_pem_x509_certificates(text) if text else []
        except ValueError:  # the Secret is made again
            return _Trust(authority)
        old = tuple(each.public_bytes(serialization.Encoding.PEM) for each in there if each not in new)
        if not old:
            return _Trust(authority)
        times: list[tuple[datetime | None, datetime | None]] = []
        for secret in secrets:
            try:
                if (found := self._found(queue, secret)) is not None:
                    times.append(_times(found, authority, now))
            except _UnusableError:  # it is not of the queue, so no pod waits for it
                continue
            except ClusterError:
                times.append((None, None))
        added, issued = (_last(each) for each in zip(*times, strict=True))
        spreads = added is None or now - added < _SPREAD
        if not spreads and issued is not None and now - issued >= _OVERLAP:
            return _Trust(authority)
        return _Trust(authority, old, spreads, added or now, issued or now)

    def _keep(
        self,
        queue: Queue,
        wanted: Manifest,
        trust: _Trust,
        names: x509.SubjectAlternativeName,
        now: datetime,
        *,
        server: bool,
    ) -> None:
        found = self._found(queue, wanted)
        data = secret_data(found) if found is not None else {}
        stays = trust.accepts(data, names, now)
        marks = _marks(found, trust, now, stays=stays)
        metadata = wanted["metadata"]
        wanted = {**wanted, "metadata": {**metadata, "annotations": {**metadata["annotations"], **marks}}}
        if stays and found is not None:
            marked = marks.items() <= (found["metadata"].get("annotations") or {}).items()
            if data["ca.crt"] != trust.bundle or not marked:
                content = {**{key: data[key] for key in KEYS}, "ca.crt": trust.bundle}
                self._write({**wanted, "type": "kubernetes.io/tls"}, content, found)
            return
        role = "server" if server else "client"
        try:
            made = issue(trust.authority, f"transferqueue {role}", names, now, CERTIFICATE_LIFE, server=server)
        except ValueError as error:
            raise _UnusableError(f"Secret {queue.child('tls-ca')}: {error}; delete it to have it made again") from None
        content = {"ca.crt": trust.bundle, "tls.crt": made.certificate, "tls.key": made.key}
        self._write({**wanted, "type": "kubernetes.io/tls"}, content, found)

    def _own(self, queue: Queue, part: str) -> Manifest:
        return manifest(queue, "v1", "Secret", part)

    def _found(self, queue: Queue, wanted: Manifest) -> Manifest | None:
        found = self._cluster.child(wanted)
        metadata = wanted["metadata"]
        own = metadata["namespace"] == queue.namespace
        foreign = foreign_owner(found, queue.uid) if own else found is not None and _key_of(found) != _key_of(wanted)
        if foreign:
            where = f"{metadata['namespace']}/{metadata['name']}"
            raise _UnusableError(f"Secret {where} exists and belongs to something else; delete it or rename the queue")
        return found

    def _write(self, secret: Manifest, content: Mapping[str, bytes], seen: Manifest | None) -> None:
        self._may_write()
        data = {name: base64.b64encode(value).decode() for name, value in content.items()}
        self._cluster.apply({**secret, "data": data}, seen)

    def _given_secrets(self, queue: Queue, now: datetime) -> list[Problem]:
        wanted: dict[str, tuple[str, ...]] = {}
        if queue.tls == "secret":
            wanted[queue.server_secret] = KEYS
        if queue.tls != "off" and (tokens := queue.spec.security.tokens_secret):
            wanted[tokens] = (*wanted.get(tokens, ()), TOKENS_KEY)
        problems = []
        for name, keys in wanted.items():
            reference = {"kind": "Secret", "metadata": {"namespace": queue.namespace, "name": name}}
            try:
                found = self._cluster.child(reference)
            except ClusterError as error:
                problems.append(refusal(f"Secret {name}", str(error), "SecretUnusable"))
                continue
            if words := _what_is_wrong(found, keys, queue.host("controller"), now):
                problems.append(Problem("SecretUnusable", f"Secret {queue.namespace}/{name} {words}"))
        return problems


class _UnusableError(Exception):
    """A Secret stands in the way; the text says what to do."""


def _signs(authority: KeyPair, now: datetime) -> bool:
    """Whether a CA is whole and does not end soon."""
    try:
        key = serialization.load_pem_private_key(authority.key, None).public_key()
        certificate = x509.load_pem_x509_certificate(authority.certificate)
        return key == certificate.public_key() and not is_due(authority.certificate, now)
    except (ValueError, TypeError):
        return False


def _times(found: Manifest, authority: KeyPair, now: datetime) -> tuple[datetime | None, datetime | None]:
    """When a Secret got the bundle with ``authority``, and a certificate of it; None: not yet."""
    data = secret_data(found)
    if not data.get("ca.crt", b"").startswith(authority.certificate):
        return None, None
    try:
        issued = issued_by(data.get("tls.crt", b""), authority.certificate)
    except ValueError:
        issued = False
    return _time(found, _ADDED, now), _time(found, _ISSUED, now) if issued else None


def _time(found: Manifest, annotation: str, now: datetime) -> datetime:
    """Not after ``now``, which also stands for a text that is no time."""
    try:
        time = datetime.fromisoformat((found["metadata"].get("annotations") or {}).get(annotation, ""))
    except ValueError:
        return now
    return min(now, time if time.tzinfo else time.replace(tzinfo=timezone.utc))


def _last(times: Iterable[datetime | None]) -> datetime | None:
    """None unless all are known."""
    known = list(times)
    return None if None in known else max(filter(None, known))


def _marks(found: Manifest | None, trust: _Trust, now: datetime, *, stays: bool) -> dict[str, str]:
    """Annotations of a Secret whose bundle has an old CA. ``stays``: it keeps its certificate."""
    if not trust.old:
        return {}
    # One that is made now takes the times of the others: no pod has an older one, and nothing waits for it.
    added, issued = _times(found, trust.authority, now) if found is not None else (trust.added, trust.issued)
    if not stays and found is not None:
        issued = now
    return {_ADDED: (added or now).isoformat(), **({_ISSUED: issued.isoformat()} if issued else {})}


def _is_ending(error: ClusterError) -> bool:
    """Whether it is refused because its namespace is being deleted."""
    return "is being terminated" in str(error)


def _foreign(queue: Queue, namespace: str) -> Manifest:
    """In another namespace nothing can be owned: such Secrets are found by their labels."""
    metadata = {
        "name": queue.client_secret(namespace),
        "namespace": namespace,
        "labels": labels(queue.name, _CLIENT),
        "annotations": {QUEUE_ANNOTATION: f"{queue.namespace}/{queue.name}"},
    }
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}


def _key_of(found: Manifest) -> tuple[str, str] | None:
    """The queue of what is not deleted with it; None for a Secret that is."""
    namespace, separator, name = found["metadata"].get("annotations", {}).get(QUEUE_ANNOTATION, "").partition("/")
    return (namespace, name) if separator else None


def queue_of_secret(found: Manifest) -> tuple[str, str] | None:
    """Namespace and name of the queue that a Secret of the operator is for."""
    if key := _key_of(found):
        return key
    metadata = found["metadata"]
    name = (metadata.get("annotations") or {}).get(QUEUE_ANNOTATION)
    return (metadata["namespace"], name) if name else None


def secret_data(secret: Manifest) -> dict[str, bytes]:
    """What the keys of a Secret hold."""
    return {name: base64.b64decode(text) for name, text in (secret.get("data") or {}).items()}


def is_good(data: Mapping[str, bytes], authority: KeyPair, names: x509.SubjectAlternativeName, now: datetime) -> bool:
    """Whether a Secret holds a certificate of ``authority`` for ``names`` that is not due for renewal."""
    if data.get("ca.crt") != authority.certificate or not {"tls.crt", "tls.key"} <= data.keys():
        return False
    try:
        return (
            not is_due(data["tls.crt"], now)
            and issued_by(data["tls.crt"], authority.certificate)
            and _names(data["tls.crt"]) == names
        )
    except ValueError:
        return False


def _names(certificate: bytes) -> x509.SubjectAlternativeName | None:
    try:
        extensions = x509.load_pem_x509_certificate(certificate).extensions
        return extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None


def _what_is_wrong(secret: Manifest | None, keys: Iterable[str], host: str, now: datetime) -> str:
    """Of a Secret that the user made; empty if nothing is."""
    if secret is None:
        return "does not exist; create it, or change spec.security."
    data = secret_data(secret)
    if missing := [key for key in keys if key not in data]:
        return f"has no {' and no '.join(missing)}."
    if "tls.crt" not in keys:
        return ""
    try:
        end = x509.load_pem_x509_certificate(data["tls.crt"]).not_valid_after_utc
        names = _names(data["tls.crt"])
    except ValueError as error:
        return f"has a tls.crt that is no certificate: {error}."
    if end <= now:
        return f"has a certificate that ended at {end:%Y-%m-%dT%H:%M:%SZ}; renew it."
    if names is None or host not in names.get_values_for_type(x509.DNSName):
        return f"has a certificate without the DNS name {host}, by which clients check it; add the name."
    return ""
