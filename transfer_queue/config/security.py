"""Certificates, tokens and the policy of a queue. Settings name files; secrets stay in the files."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from transfer_queue.config.document import Document, TerseDocument

__all__ = ["PeerSecurity", "Policy", "PolicyPrincipal", "Role", "ServerSecurity", "TlsFiles", "namespace_name"]

Role = Literal["producer", "consumer", "admin", "storage"]


def namespace_name(namespace: str) -> str:
    """The URI in the certificate that the operator gives pods of a namespace."""
    return f"urn:transferqueue:namespace:{namespace}"


class TlsFiles(TerseDocument):
    """PEM files, read again when they change: new connections use the new ones.

    Both ends show a certificate and both check the other's against ``ca``. Clients that authenticate with a token need
    no certificate of their own: they leave out ``certificate`` and ``key``.
    """

    ca: str
    certificate: str | None = None
    key: str | None = None
    server_name: str | None = None
    """A name in the certificates of all servers, where they are reached by others, such as addresses of pods."""


class PeerSecurity(TerseDocument):
    """Credentials of a process."""

    tls: TlsFiles | None = None
    """None: plain TCP."""
    token_file: str | None = None
    """A file whose only content is the token."""
    secret: str | None = Field(default=None, repr=False, min_length=16)
    """Secret of all processes of one queue, which both sides of a connection prove to know. The process that starts the
    queue makes it; files with it are private to its user."""


class ServerSecurity(PeerSecurity):
    """Admission of peers by a server. It also shows ``tls`` and ``token_file`` to servers that it connects to."""

    tokens_file: str | None = None
    """Lines of ``name token``. With it, a peer shows a token or a certificate; without, ``tls`` asks a certificate."""
    policy_file: str | None = None
    """YAML of a :class:`Policy`. None: every admitted principal may do everything."""


class PolicyPrincipal(Document):
    """Who shows the token called ``token``, or a certificate whose common name or a DNS or URI name is ``certificate``.

    ``partitions``: prefixes of partition names; ``""`` is all of them. Roles: a producer puts, a consumer fetches,
    resets and clears, both look up; an admin does all of it, and with the prefix ``""`` also checkpoints, traces and
    sees the whole queue; ``storage`` is for storage units only.
    """

    name: str = Field(min_length=1)
    token: str | None = None
    certificate: str | None = None
    roles: list[Role] = Field(min_length=1)
    partitions: list[str] = Field(default_factory=list)


class Policy(Document):
    """Permissions of each principal. Other principals have none."""

    principals: list[PolicyPrincipal]
