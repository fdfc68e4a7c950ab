"""The certificate of the webhook and the bundles: what is made when, and what stays."""

from __future__ import annotations

import base64
import copy
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic.exceptions import NotFoundError

from tq_operator.runtime.certificates import AUTHORITY_LIFE
from tq_operator.runtime.cluster import Cluster
from tq_operator.runtime.settings import WebhookSecret
from tq_operator.runtime.trust import Trust, bundle, renewed
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


SECRET, HOOK = (
    "/api/v1/namespaces/s/secrets/mine",
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/o",
)


class Apiserver(Cluster):
    """A Secret and a webhook configuration."""

    def __init__(self) -> None:
        super().__init__(client.ApiClient(client.Configuration(host="http://memory.invalid")))
        self.objects: dict[str, Any] = {
            HOOK: {"metadata": {"resourceVersion": "1"}, "webhooks": [{"clientConfig": {"caBundle": "bm9uZQ=="}}]}
        }

    def call(self, method: str, path: str, body: Any = None, *rest: Any) -> dict[str, Any]:
        if path not in self.objects:
            raise NotFoundError(ApiException(status=404, reason="Not Found"))  # type: ignore[no-untyped-call]
        if method == "PATCH":
            (_, change) = body
            assert change["path"] == "/webhooks/0/clientConfig/caBundle"
            self.objects[path]["webhooks"][0]["clientConfig"]["caBundle"] = change["value"]
        return copy.deepcopy(self.objects[path])  # type: ignore[no-any-return]

    def keep(self, content: Mapping[str, bytes]) -> None:
        data = {key: base64.b64encode(value).decode() for key, value in content.items()}
        self.objects[SECRET] = {"metadata": {}, "data": data}

    @property
    def trusted(self) -> bytes:
        return base64.b64decode(self.objects[HOOK]["webhooks"][0]["clientConfig"]["caBundle"])


def test_a_given_certificate_is_served_once_its_authority_is_trusted_and_the_old_one_goes_last(tmp_path: Path) -> None:
    apiserver, clock = Apiserver(), [0.0]
    given = WebhookSecret("s", "mine", "o", made=False)
    trust = Trust(apiserver, given, tmp_path, lambda: True, lambda: clock[0])

    def look(after: float) -> bytes:
        clock[0] += after
        trust.look(NOW)
        return (tmp_path / "tls.crt").read_bytes() if trust.served else b""

    with pytest.raises(ValueError, match=r"Secret s/mine does not exist; create it"):
        look(0)
    old, new = first(), first()
    apiserver.keep({"tls.crt": old["tls.crt"], "tls.key": old["tls.key"]})
    with pytest.raises(ValueError, match=r"Secret s/mine has no ca\.crt; add it"):
        look(0)
    apiserver.keep(old)
    assert look(0) == b""
    assert apiserver.trusted == old["ca.crt"]
    assert look(3) == old["tls.crt"]
    apiserver.keep(new)
    assert look(2) == old["tls.crt"]
    assert apiserver.trusted == new["ca.crt"] + old["ca.crt"]
    assert look(3) == new["tls.crt"]
    assert look(1800) == new["tls.crt"]
    assert apiserver.trusted == new["ca.crt"] + old["ca.crt"]
    look(1800)
    assert apiserver.trusted == new["ca.crt"]
