"""The certificate authority of one cluster and the client configurations that rest on it."""

from __future__ import annotations

import base64
import ipaddress
import json
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = timedelta(days=365)
CLOCK_SLACK = timedelta(hours=1)


@dataclass(frozen=True)
class KeyPair:
    """Files of a private key and of the certificate, or public key, that goes with it."""

    key: Path
    certificate: Path


class Authority:
    """Issues the cluster's certificates into one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "transferqueue-cluster")])
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.files = self._write("ca", self._key, certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, common_name: str, group: str = "", hosts: tuple[str, ...] = ()) -> KeyPair:
        """Write NAME.key and NAME.crt for user `common_name` of `group`, serving `hosts` (names or addresses)."""
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        if group:
            attributes.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        names = [_general_name(host) for host in (*hosts, name)]
        certificate = (
            self._builder(x509.Name(attributes), key.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return self._write(name, key, certificate.public_bytes(serialization.Encoding.PEM))

    def signing_key(self, name: str) -> KeyPair:
        """Write a bare key pair, as service account tokens need it."""
        key = ec.generate_private_key(ec.SECP256R1())
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return self._write(name, key, public)

    def kubeconfig(self, path: Path, server: str, user: KeyPair) -> Path:
        """Write a client configuration for `user` at `server` (an https URL), self-contained, as JSON (valid YAML)."""
        cluster = {"server": server, "certificate-authority-data": _inline(self.files.certificate)}
        identity = {"client-certificate-data": _inline(user.certificate), "client-key-data": _inline(user.key)}
        name = "transferqueue-cluster"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": cluster}],
            "users": [{"name": name, "user": identity}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "current-context": name,
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(config, indent=1))
        return path

    def _builder(self, subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.now(timezone.utc)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SLACK)
            .not_valid_after(now + LIFETIME)
        )

    def _write(self, name: str, key: ec.EllipticCurvePrivateKey, public: bytes) -> KeyPair:
        pair = KeyPair(self._folder / f"{name}.key", self._folder / f"{name}.crt")
        pair.key.touch(mode=0o600)
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        pair.certificate.write_bytes(public)
        return pair


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _inline(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()
