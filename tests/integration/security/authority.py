"""Certificates, tokens and policies for tests, as files."""

from __future__ import annotations

import datetime
import ipaddress
import json
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    """A CA with its files in ``folder``."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = (
            _builder(self._name, self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = folder / f"{name}.crt"
        self.ca.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, expired: bool = False, life: datetime.timedelta = DAY) -> dict[str, Any]:
        """Settings ``security.tls`` of a certificate with the common name ``name``, good for loopback."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        certificate = (
            _builder(subject, self._name, key, -DAY if expired else life)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        paths = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return {"ca": str(self.ca), "certificate": str(paths[0]), "key": str(paths[1])}


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, life: datetime.timedelta = DAY
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 3 * DAY)
        .not_valid_after(now + life)
    )


TOKENS = {name: f"{name}-secret-0123456789" for name in ("a", "b", "reader", "root", "storage")}


def token_files(folder: Path) -> str:
    """The server's file of ``TOKENS``, and ``NAME.token`` for each client."""
    for name, token in TOKENS.items():
        (folder / f"{name}.token").write_text(token + "\n")
    path = folder / "tokens"
    path.write_text("# name token\n" + "".join(f"{name} {token}\n" for name, token in TOKENS.items()))
    return str(path)


def policy_file(folder: Path) -> str:
    """Tenants a and b, a reader of a's rows, an administrator, and the storage units."""
    both = ["producer", "consumer"]
    rules = [("a", both, ["a/"]), ("b", both, ["b/"]), ("reader", ["consumer"], ["a/"]), ("root", ["admin"], [""])]
    principals = [
        {"name": name, "token": name, "certificate": name, "roles": roles, "partitions": prefixes}
        for name, roles, prefixes in rules
    ]
    principals.append({"name": "storage", "token": "storage", "certificate": "storage", "roles": ["storage"]})
    path = folder / "policy.yaml"
    path.write_text(json.dumps({"principals": principals}))
    return str(path)
