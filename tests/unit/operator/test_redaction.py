"""What a support bundle shows of objects and texts, and what it never shows."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import yaml

from tq_operator.kubectl.parts import Part
from tq_operator.kubectl.redaction import REDACTED, Redactor, references


def pod(**spec: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [], **spec}}


def shown(found: dict[str, Any]) -> str:
    redactor = Redactor()
    return redactor.text(yaml.safe_dump(redactor.strings(redactor.manifest(found))))


def test_the_products_own_settings_are_shown() -> None:
    env = [{"name": "TQ_LOGGING_LEVEL", "value": "DEBUG"}, {"name": "POD_NAME", "valueFrom": {"fieldRef": {}}}]
    container = {"name": "storage", "command": ["python3", "-m", "transfer_queue"], "env": env}
    found = yaml.safe_load(shown(pod(containers=[container], automountServiceAccountToken=False)))
    assert found["spec"]["containers"] == [container]
    assert found["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", [*(part.value for part in Part), "controller-11"])
def test_the_command_of_every_part_is_shown(name: str) -> None:
    container = {"name": name, "command": [name, "--rpc_port=50051"]}
    assert yaml.safe_load(shown(pod(containers=[container])))["spec"]["containers"] == [container]


def test_the_settings_file_keeps_names_of_files_and_loses_what_is_foreign() -> None:
    files = {"controller-1.yaml": "port: 50060\nsecurity: {tokenFile: /run/token}\n", "more": "hunter2-hunter2"}
    config = {"kind": "ConfigMap", "metadata": {"name": "q-config"}, "data": files, "binaryData": {"b": "aGlkZGVu"}}
    found = yaml.safe_load(shown(config))
    settings = yaml.safe_load(found["data"]["controller-1.yaml"])
    assert settings == {"port": 50060, "security": {"tokenFile": "/run/token"}}
    assert (found["data"]["more"], found["binaryData"]) == (REDACTED, {"b": REDACTED})


SECRET = "s3cr3t-w0rd"


@pytest.mark.parametrize(
    "found",
    [
        pod(containers=[{"name": "storage", "env": [{"name": "SETTING", "value": SECRET}]}]),
        pod(containers=[{"name": "storage", "env": [{"name": "TQ_API_TOKEN", "value": SECRET}]}]),
        pod(containers=[{"name": "sidecar", "command": ["run", f"--key={SECRET}"], "args": [SECRET]}]),
        pod(initContainers=[{"name": "storage", "args": [SECRET]}]),
        {"kind": "Secret", "metadata": {}, "data": {"any": base64.b64encode(SECRET.encode()).decode()}},
        {"kind": "ConfigMap", "metadata": {}, "data": {"any": SECRET}},
        {"kind": "ConfigMap", "metadata": {}, "data": {"storage.yaml": f"password: {SECRET}"}},
        {"kind": "Pod", "metadata": {"annotations": {"example.com/any": SECRET}}},
        {"kind": "Pod", "metadata": {"annotations": {"transferqueue.io/token": SECRET}}},
        {"kind": "Pod", "metadata": {"annotations": {"kubectl.kubernetes.io/last-applied-configuration": SECRET}}},
        {"kind": "TransferQueue", "spec": {"storage": {"env": [{"name": "A", "value": SECRET}]}}},
        {"kind": "TransferQueue", "spec": {"controller": {"annotations": {"a": SECRET}}}},
        {"kind": "TransferQueue", "spec": {"storage": {"extraContainers": [{"name": "x", "command": [SECRET]}]}}},
        {"kind": "TransferQueue", "spec": {"controller": {"sampler": {"args": {"apiKey": SECRET}}}}},
        {"kind": "Pod", "metadata": {"managedFields": [{"f": SECRET}]}},
    ],
)
def test_no_place_of_an_object_shows_a_secret(found: dict[str, Any]) -> None:
    text = shown(found)
    assert SECRET not in text
    assert base64.b64encode(SECRET.encode()).decode() not in text


def test_what_was_taken_out_of_objects_is_taken_out_of_logs_in_every_form() -> None:
    redactor = Redactor()
    several = 'first "line"\nsecond line'
    redactor.manifest(pod(containers=[{"name": "storage", "env": [{"name": "A", "value": several}]}]))
    encoded = base64.b64encode(several.encode()).decode()
    text = redactor.text(f"at start: {several} | {json.dumps(several)} | {encoded} | all is well")
    assert not any(word in text for word in ("first", "second", encoded))
    assert text.endswith("all is well")


def test_a_secret_of_several_words_is_found_before_yaml_folds_it() -> None:
    words = "correct horse battery staple " * 5
    redactor = Redactor()
    redactor.manifest(pod(containers=[{"name": "storage", "env": [{"name": "A", "value": words}]}]))
    assert "horse" not in yaml.safe_dump(redactor.strings({"status": {"message": f"it's: {words}; ended"}}))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Authorization: Bearer abcdefgh12345", "Authorization"),
        ("token eyJhbGciOi.eyJzdWIiOi.c2lnbmF0dXJl is old", "is old"),
        ("see https://user:pa55word@registry.example/v2", "registry.example/v2"),
        ("with hf_abcdefghijkl and sk-abcdefghijkl", "with"),
        ('{"password": "abcdefgh12345", "rows": 3}', '"rows": 3'),
        ("aws_secret_access_key=abcdefgh12345 region=eu", "region=eu"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabcdefgh12345\n-----END RSA PRIVATE KEY-----\nend", "end"),
        ("-----BEGIN PRIVATE KEY-----\nabcdefgh12345", ""),
    ],
)
def test_what_looks_like_a_credential_is_taken_out_of_texts(text: str, kept: str) -> None:
    cleaned = Redactor().text(text)
    assert REDACTED in cleaned
    assert kept in cleaned
    assert not any(word in cleaned for word in ("abcdefgh", "eyJ", "c2ln", "pa55"))


@pytest.mark.parametrize(
    "text", ["tokens: 4096 rows", "secretName: webhook", "fields=tokens,reward", "no token given", "tq_rows 3.0"]
)
def test_words_about_rows_and_names_stay(text: str) -> None:
    assert Redactor().text(text) == text


def test_the_secrets_and_config_maps_that_a_pod_sees_are_found() -> None:
    reference = {"name": "a"}
    found = pod(
        containers=[
            {
                "name": "c",
                "env": [
                    {"name": "A", "valueFrom": {"secretKeyRef": {**reference, "key": "k"}}},
                    {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "b", "key": "k"}}},
                ],
                "envFrom": [{"secretRef": {"name": "c"}}, {"configMapRef": {"name": "d"}}],
            }
        ],
        volumes=[
            {"name": "v", "secret": {"secretName": "e"}},
            {"name": "w", "projected": {"sources": [{"secret": {"name": "f"}}, {"configMap": {"name": "g"}}]}},
        ],
        imagePullSecrets=[{"name": "h"}],
    )
    assert set(references(found)) == {
        *(("Secret", name) for name in "acefh"),
        *(("ConfigMap", name) for name in "bdg"),
    }
