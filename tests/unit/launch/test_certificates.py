"""What the certificates of a queue's own CA are good for, and how long."""

from __future__ import annotations

import ssl
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from transfer_queue.launch.certificates import (
    KeyPair,
    client_names,
    is_due,
    issue,
    issued_by,
    new_authority,
    server_names,
)

DAY = timedelta(days=1)
NOW = datetime.now(timezone.utc)
CA = new_authority("q", NOW, 100 * DAY)
SERVER = issue(CA, "server", server_names(["q.svc", "*.units.svc", "127.0.0.1"]), NOW, 90 * DAY, server=True)
CLIENT = issue(CA, "client", client_names("urn:q:client"), NOW, 90 * DAY, server=False)


def context(folder: Path, protocol: int, pair: KeyPair, authority: KeyPair = CA) -> ssl.SSLContext:
    made = ssl.SSLContext(protocol)
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    (folder / "both.pem").write_bytes(pair.certificate + pair.key)
    made.load_cert_chain(folder / "both.pem")
    made.load_verify_locations(cadata=authority.certificate.decode())
    return made


def handshake(folder: Path, client: KeyPair, server: KeyPair, host: str = "q.svc", authority: KeyPair = CA) -> str:
    """Name of the client that the server saw. Raises SSLError."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = context(folder, ssl.PROTOCOL_TLS_CLIENT, client, authority).wrap_bio(down, up, server_hostname=host)
    other = context(folder, ssl.PROTOCOL_TLS_SERVER, server).wrap_bio(up, down, server_side=True)
    for _ in range(4):
        for side in (one, other):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    ((_, found),) = (other.getpeercert() or {})["subjectAltName"]
    return str(found)


@pytest.mark.parametrize("host", ["q.svc", "q-storage-0.units.svc", "127.0.0.1"])
def test_clients_and_servers_accept_each_other_under_the_strict_rules_of_rfc_5280(tmp_path: Path, host: str) -> None:
    assert handshake(tmp_path, CLIENT, SERVER, host) == "urn:q:client"


def test_a_client_cannot_pose_as_a_server(tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"(?i)purpose"):
        handshake(tmp_path, CLIENT, CLIENT)


def test_the_ca_of_another_queue_is_not_trusted(tmp_path: Path) -> None:
    other = new_authority("q", NOW, 100 * DAY)
    assert issued_by(SERVER.certificate, CA.certificate)
    assert not issued_by(SERVER.certificate, other.certificate)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, CLIENT, SERVER, authority=other)


def test_a_certificate_that_a_clock_ahead_made_is_due_once_the_clock_is_right() -> None:
    assert not is_due(SERVER.certificate, NOW)
    assert is_due(SERVER.certificate, NOW - DAY)


def test_a_certificate_is_due_when_a_third_of_its_life_is_left() -> None:
    assert not is_due(SERVER.certificate, NOW + 59 * DAY)
    assert is_due(SERVER.certificate, NOW + 61 * DAY)


def test_no_certificate_outlives_its_authority_and_an_ended_one_signs_nothing() -> None:
    late = issue(CA, "late", client_names("urn:q:late"), NOW + 95 * DAY, 90 * DAY, server=False)
    assert is_due(late.certificate, NOW + 99 * DAY)
    with pytest.raises(ValueError, match=r"the authority in ca\.crt has ended"):
        issue(CA, "later", client_names("urn:q:later"), NOW + 101 * DAY, 90 * DAY, server=False)


def test_keys_do_not_show_when_a_pair_is_printed() -> None:
    assert "PRIVATE" not in repr(CA) + str([CA])
