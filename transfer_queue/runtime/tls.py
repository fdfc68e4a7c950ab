"""TLS 1.3 with certificates on both sides, and tokens: what a process shows and what it checks, from files.

Files are looked at again with each new connection and read again when they changed; an unreadable new one leaves what
was read before in place, with a warning.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import ssl
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from transfer_queue.config.attach import Target, parse_address
from transfer_queue.config.security import PeerSecurity, ServerSecurity, TlsFiles
from transfer_queue.errors import ConfigError, NotAuthorizedError, TransferQueueError
from transfer_queue.runtime.secret import is_proof, new_nonce, prove
from transfer_queue.wire.messages import Challenge, Hello, Welcome

__all__ = [
    "HANDSHAKE_S",
    "Credentials",
    "ReloadingFile",
    "Tokens",
    "authorities",
    "explain_loss",
    "explain_tls",
    "is_loopback",
    "listen_context",
]

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""How long a peer may take for its TLS handshake."""
_SHORTEST_TOKEN = 16
_ANY = Target()

T = TypeVar("T")


class ReloadingFile(Generic[T]):
    """The result of reading some files, read again when one of them changed."""

    def __init__(self, paths: list[str], read: Callable[[], T]) -> None:
        """Raises ConfigError if it cannot be read now."""
        self._paths = paths
        self._read = read
        self._state = self._look()
        self._value = read()

    def get(self) -> T:
        """The newest that could be read."""
        state = self._look()
        if state != self._state:
            self._state = state
            try:
                self._value = self._read()
            except ConfigError as error:
                log.warning("%s; going on with what was read before", error)
        return self._value

    def _look(self) -> list[tuple[int, int, int]]:
        state = []
        for path in self._paths:
            try:
                found = os.stat(path)
            except OSError:
                state.append((0, 0, 0))
            else:
                state.append((found.st_ino, found.st_mtime_ns, found.st_size))
        return state


class Credentials:
    """Credentials for servers, and checks of servers. ``PeerSecurity()`` means plain TCP without a token.

    ``target``: the expected queue of a controller.
    """

    def __init__(self, security: PeerSecurity, target: Target = _ANY) -> None:
        """Raises ConfigError naming the file that cannot be used."""
        tls, token_file = security.tls, security.token_file
        self.target = target
        self._secret = security.secret
        self.server_name = None if tls is None else tls.server_name
        """The name that a server's certificate must have; None: the host that is connected to."""
        self._context = None if tls is None else ReloadingFile(_paths(tls), lambda: _client_context(tls))
        self._token = None if token_file is None else ReloadingFile([token_file], lambda: _read_token(token_file))
        self._warned = False

    def context(self) -> ssl.SSLContext | None:
        """For the next connection; None: plain TCP."""
        return None if self._context is None else self._context.get()

    def token(self, host: str) -> str:
        """For the Hello to ``host``; empty: none."""
        if self._token is None:
            return ""
        if self._context is None and not is_loopback(host) and not self._warned:
            self._warned = True
            log.warning("the token goes to %s without TLS, readable on the way; set security.tls", host)
        return self._token.get()

    @property
    def know_servers(self) -> bool:
        """Return whether servers prove their identity, by a certificate or by the secret."""
        return self._context is not None or self._secret is not None

    def introduce(self, hello: Hello, address: str) -> Hello:
        """Return ``hello`` with the credentials for the server at ``address``."""
        if token := self.token(parse_address(address)[0]):
            hello = msgspec.structs.replace(hello, token=token)
        return hello if self._secret is None else msgspec.structs.replace(hello, nonce=new_nonce())

    def prove(self, hello: Hello, challenge: Challenge, address: str) -> Hello:
        """Return ``hello`` with the proof of the secret that the server at ``address`` asks for.

        Without a secret it has none, and the server tells why it refuses it.
        """
        if self._secret is None:
            return hello
        nonce = hello.nonce + challenge.nonce
        proof = prove(self._secret, "client", parse_address(address)[1], nonce)
        return msgspec.structs.replace(hello, nonce=nonce, proof=proof)

    def check(self, hello: Hello, welcome: Welcome, address: str) -> None:
        """Check that the server at ``address``, which answered ``hello``, is the expected one.

        Raises NotAuthorizedError if it does not know the secret, ConfigError if it belongs to another queue.
        """
        if welcome.server == "controller":
            wrong = self.target.mismatch(welcome.name, welcome.attributes.get("uid"), address)
            if wrong is not None:
                raise ConfigError(wrong)
        if self._secret is not None:
            proof = welcome.attributes.get("proof")
            if not is_proof(proof, self._secret, "server", parse_address(address)[1], hello.nonce):
                named = f" ({self.target.origin})" if self.target.origin else ""
                raise NotAuthorizedError(
                    f"the server at {address}{named} does not know the secret of the queue: the queue has ended and "
                    "another program listens there; start the queue again, or attach to another queue"
                )


class Tokens:
    """The tokens that a server accepts, by name. Only digests are kept."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError."""
        self._digests = ReloadingFile([path], lambda: _read_tokens(path))

    def current(self) -> dict[str, bytes]:
        """Name -> digest."""
        return self._digests.get()

    def name_of(self, token: str) -> str | None:
        """Whose token it is. Takes equally long for every token."""
        shown = hashlib.sha256(token.encode()).digest()
        found = None
        for name, digest in self._digests.get().items():
            if hmac.compare_digest(digest, shown):
                found = name
        return found


def authorities(tls: TlsFiles) -> ReloadingFile[frozenset[bytes]]:
    """The certificates of ``tls.ca``, DER, as they are now. Raises ConfigError."""
    alone = tls.model_copy(update={"certificate": None, "key": None})
    return ReloadingFile([tls.ca], lambda: frozenset(_client_context(alone).get_ca_certs(binary_form=True)))


def listen_context(security: ServerSecurity) -> ssl.SSLContext | None:
    """For a listening server; None: plain TCP. Raises ConfigError.

    Each handshake takes its certificate and CA from the files as they are then. No session is resumed, so that none
    outlives the certificates it was made with.
    """
    tls = security.tls
    if tls is None:
        return None
    if tls.certificate is None or tls.key is None:
        raise ConfigError("security.tls: a server needs certificate and key")
    context = _server_context(security)
    newest = ReloadingFile(_paths(tls), lambda: _server_context(security))

    def renew(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, of: ssl.SSLContext) -> None:
        connection.context = newest.get()

    context.sni_callback = renew  # runs for every ClientHello, with or without a server name
    return context


def is_loopback(host: str) -> bool:
    """Does ``host`` name this machine without leaving it?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_of(certificate: dict[str, Any]) -> list[str]:
    """Common name, then DNS and URI names, of a certificate as ``SSLSocket.getpeercert`` gives it."""
    common = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return common + [value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI")]


def explain_tls(error: OSError, what: str, address: str) -> str:
    """Why a TLS handshake failed, and what to do about it."""
    begin = f"the TLS handshake with the {what} at {address} failed"
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"{begin}: its certificate is refused here ({error.verify_message}); security.tls.ca must name the CA "
            "that issued it, and the certificate the host name and a time that includes now"
        )
    text = str(error.reason or error) if isinstance(error, ssl.SSLError) else error.strerror or str(error)
    return f"{begin}: {text}; if that port is plain TCP, remove security.tls here, or set it at the server"


def explain_loss(error: TransferQueueError, uses_tls: bool) -> str:
    """Why a server may have closed a connection before it answered the Hello."""
    if uses_tls:
        return (
            f"{error} before it answered; it refuses this process's certificate, if it is expired, missing or of "
            "another CA than the server's: see security.tls.certificate, key and ca"
        )
    return f"{error} before it answered; if it speaks TLS, set security.tls (ca, certificate, key) here"


def _paths(tls: TlsFiles) -> list[str]:
    return [path for path in (tls.ca, tls.certificate, tls.key) if path is not None]


def _server_context(security: ServerSecurity) -> ssl.SSLContext:
    assert security.tls is not None
    context = _context(ssl.PROTOCOL_TLS_SERVER, security.tls)
    context.verify_mode = ssl.CERT_REQUIRED if security.tokens_file is None else ssl.CERT_OPTIONAL
    context.num_tickets = 0
    return context


def _client_context(tls: TlsFiles) -> ssl.SSLContext:
    return _context(ssl.PROTOCOL_TLS_CLIENT, tls)


def _context(protocol: int, tls: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if (tls.certificate is None) != (tls.key is None):
        raise ConfigError("security.tls: certificate and key go together")
    try:
        context.load_verify_locations(tls.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"security.tls.ca: {tls.ca} is not a readable PEM file of certificates: {error}") from None
    if tls.certificate is not None:
        try:
            context.load_cert_chain(tls.certificate, tls.key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"security.tls: {tls.certificate} and {tls.key} are not a certificate and its key: {error}"
            ) from None
    return context


def _no_password() -> str:
    """OpenSSL would ask the terminal, and a server wait for it for ever."""
    return ""


def _read_lines(setting: str, path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return [line.strip() for line in file if line.strip() and not line.startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"security.{setting}: cannot read {path}: {reason}") from None


def _read_token(path: str) -> str:
    lines = _read_lines("tokenFile", path)
    if len(lines) != 1 or len(lines[0].split()) != 1:
        raise ConfigError(f"security.tokenFile: {path} must hold one token and nothing else")
    return lines[0]


def _read_tokens(path: str) -> dict[str, bytes]:
    digests: dict[str, bytes] = {}
    for number, line in enumerate(_read_lines("tokensFile", path), 1):
        name, _, token = line.partition(" ")
        token = token.strip()
        if len(token) < _SHORTEST_TOKEN or name in digests:
            raise ConfigError(
                f"security.tokensFile: {path}, entry {number}: write a name used once, a space, and a token of at "
                f"least {_SHORTEST_TOKEN} characters"
            )
        digests[name] = hashlib.sha256(token.encode()).digest()
    return digests
