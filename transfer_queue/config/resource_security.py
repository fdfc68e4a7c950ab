"""``spec.security`` of a TransferQueue: TLS, tokens, and who may do what."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from transfer_queue.config.rules import Matches, Model, Rule
from transfer_queue.config.security import Policy, PolicyPrincipal, namespace_name

__all__ = ["IssuerRef", "PolicyEntry", "Security", "Tls", "TlsMode"]

TlsMode = Literal["off", "operator", "secret", "issuer"]
SecretName = Annotated[str, Matches(r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", "the name of a Secret", 253)]


class IssuerRef(Model):
    """An issuer of cert-manager."""

    name: SecretName = Field(description="Name of the issuer.")
    kind: str = Field(
        default="Issuer",
        description="Issuer: of the namespace of each certificate; ClusterIssuer: one for all namespaces; or the kind "
        "of an external issuer.",
    )
    group: str = Field(default="cert-manager.io", description="Group of that kind.")


class Tls(Model):
    """TLS 1.3 with certificates on both sides, between clients, controller and storage units."""

    mode: TlsMode | None = Field(
        default=None,
        description='"off" (quoted: YAML reads a bare off as false): plain TCP; operator: certificates of a CA that '
        "this queue alone has, renewed in time; secret: those in serverSecret and clientSecret; issuer: those that "
        "cert-manager gets from issuerRef. Unset: operator where there is a policy or tokensSecret, else what the "
        "chart's value queues.tls says, with tq up off.",
    )
    server_secret: SecretName | None = Field(
        default=None,
        description="Secret beside the queue with ca.crt, tls.crt and tls.key for controller and storage units; its "
        "certificate names QUEUE-controller.NAMESPACE.svc.",
    )
    client_secret: SecretName | None = Field(
        default=None,
        description="Secret with ca.crt, tls.crt and tls.key for pods that use the queue, in each of their namespaces.",
    )

    issuer_ref: IssuerRef | None = Field(
        default=None,
        description="Who signs the certificates of mode issuer. Without a policy, every holder of a certificate of the "
        "same CA that is good for clients may use the queue.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda self: (self.issuer_ref is not None) == (self.mode == "issuer"),
            "has(self.issuerRef) == (has(self.mode) && self.mode == 'issuer')",
            "issuerRef is set with mode issuer, and only then",
        ),
        Rule(
            lambda self: [self.server_secret, self.client_secret].count(None) == (0 if self.mode == "secret" else 2),
            "has(self.mode) && self.mode == 'secret' ? has(self.serverSecret) && has(self.clientSecret)"
            " : !has(self.serverSecret) && !has(self.clientSecret)",
            "serverSecret and clientSecret are set with mode secret, both of them, and only then",
        ),
    )


class PolicyEntry(Model):
    """Who may do what."""

    name: str = Field(description="Name for logs and refusals.")
    token: str | None = Field(default=None, description="Those who show the token of this name in tokensSecret.")
    certificate: str | None = Field(
        default=None, description="Those whose certificate has this common name, or DNS or URI name."
    )
    namespace: str | None = Field(
        default=None, description="Pods of this namespace, by the certificate that the operator gave them."
    )
    roles: Annotated[list[Literal["producer", "consumer", "admin"]], Field(max_length=3)] = Field(
        description="A producer puts, a consumer fetches, resets and clears, an admin does all of it."
    )
    partitions: Annotated[list[str], Field(max_length=256)] = Field(
        default=[], description='Prefixes of the partitions that this is about; "" is all of them.'
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda self: [self.token, self.certificate, self.namespace].count(None) == 2,
            "[has(self.token), has(self.certificate), has(self.namespace)].filter(x, x).size() == 1",
            "set exactly one of token, certificate, namespace",
        ),
        Rule(
            lambda self: len(self.roles) > 0,
            "self.roles.size() > 0",
            "name at least one of the roles producer, consumer, admin",
        ),
    )


class Security(Model):
    """What the servers and clients refuse."""

    allow_pickle: bool = Field(default=False, description="Let clients pickle values that msgpack cannot carry.")
    network_policy: bool = Field(
        default=False, description="Let only pods that were given the queue reach its pods; metrics stay open."
    )
    tls: Tls = Field(default=Tls(), description="Encryption, and who the peers are.")
    tokens_secret: SecretName | None = Field(
        default=None,
        description='Secret beside the queue whose key tokens has lines of "name token". Pods name the Secret of '
        "their own token, key token, in the annotation transferqueue.io/token-secret.",
    )
    policy: Annotated[list[PolicyEntry], Field(max_length=256)] | None = Field(
        default=None,
        description="Permissions of each principal; other principals have none. Unset: every admitted principal "
        "may do everything.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda self: self.tls.mode != "off" or (self.policy is None and self.tokens_secret is None),
            "!has(self.tls) || !has(self.tls.mode) || self.tls.mode != 'off'"
            " || (!has(self.policy) && !has(self.tokensSecret))",
            'policy and tokensSecret need TLS: remove tls.mode "off"',
        ),
        Rule(
            lambda self: self.tokens_secret is not None or all(entry.token is None for entry in self.policy or ()),
            "has(self.tokensSecret) || !has(self.policy) || self.policy.all(entry, !has(entry.token))",
            "a token in the policy needs tokensSecret, which has the tokens",
        ),
    )

    def tls_mode(self, default: TlsMode) -> TlsMode:
        """How connections are made, where ``default`` is used by queues that do not say so."""
        if self.tls.mode is not None:
            return self.tls.mode
        return "operator" if self.policy is not None or self.tokens_secret is not None else default

    def policy_document(self, server: str, *, saves: bool) -> Policy | None:
        """The policy as servers read it. ``server``: a name of the certificate of controller and storage units, and of
        the process that ``saves`` the queue, if there is one."""
        if self.policy is None:
            return None
        storage = PolicyPrincipal(name="storage", certificate=server, roles=["storage"])
        if saves:
            storage = PolicyPrincipal(name="storage", certificate=server, roles=["storage", "admin"], partitions=[""])
        others = [
            PolicyPrincipal(
                name=entry.name,
                token=entry.token,
                certificate=namespace_name(entry.namespace) if entry.namespace else entry.certificate,
                roles=[*entry.roles],
                partitions=entry.partitions,
            )
            for entry in self.policy
        ]
        return Policy(principals=[storage, *others])
