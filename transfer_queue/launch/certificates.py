"""A CA of one's own and certificates of it: what ``tq up`` and the operator give servers and clients.

Needs the package ``cryptography``, which is installed with ``TransferQueue[tls]``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

__all__ = ["KeyPair", "client_names", "is_due", "issue", "issued_by", "new_authority", "server_names", "sign"]

_CLOCK_SKEW = timedelta(minutes=5)


@dataclass(frozen=True)
class KeyPair:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "KeyPair(...)"  # keys are in no log


def new_authority(name: str, now: datetime, life: timedelta) -> KeyPair:
    """A CA that signs certificates and no other CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    made = (
        _builder(subject, subject, key, now, now + life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return KeyPair(made.public_bytes(serialization.Encoding.PEM), _pem(key))


def server_names(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    """Host names and IP addresses."""
    return x509.SubjectAlternativeName([_host(name) for name in hosts])


def client_names(uri: str) -> x509.SubjectAlternativeName:
    """The URI by which a policy knows the client."""
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])


def issue(
    authority: KeyPair,
    name: str,
    names: x509.SubjectAlternativeName,
    now: datetime,
    life: timedelta,
    *,
    server: bool,
) -> KeyPair:
    """A certificate with the common name ``name``. Servers are clients too, of other servers; clients no servers."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    uses = [ExtendedKeyUsageOID.SERVER_AUTH] if server else []
    return sign(authority, subject, names, [*uses, ExtendedKeyUsageOID.CLIENT_AUTH], now, life)


def sign(
    authority: KeyPair,
    subject: x509.Name,
    names: x509.SubjectAlternativeName,
    uses: Sequence[x509.ObjectIdentifier],
    now: datetime,
    life: timedelta,
) -> KeyPair:
    """A certificate with a new key, which ends no later than its authority. Raises ValueError."""
    signer_certificate = x509.load_pem_x509_certificate(authority.certificate)
    if signer_certificate.not_valid_after_utc <= now:
        raise ValueError("the authority in ca.crt has ended")
    signer = serialization.load_pem_private_key(authority.key, None)
    if not isinstance(signer, (rsa.RSAPrivateKey, ec.EllipticCurvePrivateKey)):
        raise ValueError("ca.key is neither an RSA nor an elliptic curve key")  # noqa: TRY004
    key = ec.generate_private_key(ec.SECP256R1())
    end = min(now + life, signer_certificate.not_valid_after_utc)
    signer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    made = (
        _builder(subject, signer_certificate.subject, key, now, end)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(signer_key, critical=False)
        .sign(signer, hashes.SHA256())
    )
    return KeyPair(made.public_bytes(serialization.Encoding.PEM), _pem(key))


def is_due(certificate: bytes, now: datetime) -> bool:
    """Whether less than a third of its life is left, or it has not begun: it was made by a clock that was ahead.

    Raises ValueError if it is no certificate.
    """
    read = x509.load_pem_x509_certificate(certificate)
    begins, ends = read.not_valid_before_utc, read.not_valid_after_utc
    return now < begins or ends - now <= (ends - begins) / 3


def issued_by(certificate: bytes, authority: bytes) -> bool:
    """Whether the CA of ``authority`` signed ``certificate``. Also False if one of them is no certificate."""
    try:
        x509.load_pem_x509_certificate(certificate).verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
    except (InvalidSignature, TypeError, ValueError):
        return False
    return True


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(end)
    )


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
