"""The certificate of the webhook and the bundles: what is made when, and what stays."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from cryptography import x509

from tq_operator.runtime.certificates import AUTHORITY_LIFE
from tq_operator.runtime.trust import bundle, renewed
from transfer_queue.launch.certificates import issued_by, new_authority

NOW = datetime.now(timezone.utc)
YEAR = timedelta(days=365)
HOSTS = ["o", "o.s", "o.s.svc"]


def made(data: dict[str, bytes], now: datetime = NOW) -> dict[str, bytes] | None:
    return renewed(data, "o", HOSTS, YEAR, now)


def first() -> dict[str, bytes]:
    content = made({})
    assert content is not None
    return content


def test_a_certificate_is_renewed_by_the_same_authority_before_it_ends() -> None:
    content = first()
    assert made(content, NOW + timedelta(days=200)) is None
    fresh = made(content, NOW + timedelta(days=300))
    assert fresh is not None
    assert (fresh["ca.crt"], fresh["ca.key"]) == (content["ca.crt"], content["ca.key"])
    old, new = (x509.load_pem_x509_certificate(each["tls.crt"]) for each in (content, fresh))
    assert issued_by(fresh["tls.crt"], content["ca.crt"])
    assert new.not_valid_after_utc > old.not_valid_after_utc
    names = new.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == HOSTS


@pytest.mark.parametrize("fault", ["ca.key", "ca.crt", "no key", "due"])
def test_a_secret_that_cannot_be_used_is_made_again_whole(fault: str) -> None:
    content = first()
    now = NOW
    if fault == "due":
        now = NOW + AUTHORITY_LIFE - timedelta(days=30)
    elif fault == "no key":
        del content["ca.key"]
        del content["tls.key"]
    else:
        content[fault] = b"damaged"
        del content["tls.crt"]
    fresh = made(content, now)
    assert fresh is not None
    assert fresh["ca.crt"] != content["ca.crt"]
    assert made(fresh, now) is None


def test_a_bundle_holds_the_old_authorities_beside_the_new_one_until_they_are_dropped() -> None:
    old, new = (new_authority(name, NOW, YEAR).certificate for name in ("old", "new"))
    both = bundle(old, new, keep=True)
    assert both == new + old
    assert bundle(both, new, keep=True) == both
    assert bundle(both, new, keep=False) == new
    assert bundle(new, new, keep=False) == new
    assert bundle(b"-----BEGIN nonsense", new, keep=True) == new
    with pytest.raises(ValueError, match="Unable to load"):
        bundle(old, b"", keep=True)
