"""Pieces of ``kubectl tq`` that need no cluster: durations, ports, the certificate, completion, the kubeconfig."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from tests.cluster.pki import LIFETIME, Authority
from tests.unit.operator.queues import IMAGES, queue
from tests.unit.operator.signals import same_signals
from tq_operator.kubectl import complete, main
from tq_operator.kubectl.access import Access
from tq_operator.kubectl.bundle import _metrics_ports, _written
from tq_operator.kubectl.checks import FIXES, certificate_findings
from tq_operator.kubectl.forwarding import choose_ports, is_controller_port
from tq_operator.kubectl.logs import parse_duration
from tq_operator.kubectl.overview import draw_overview
from tq_operator.kubectl.redaction import Redactor
from tq_operator.kubectl.streams import Forwarder
from tq_operator.plan.children import desired_children
from tq_operator.runtime.cluster import ClusterError
from transfer_queue.cli.doctor import Finding, draw_findings
from transfer_queue.cli.output import Output, show
from transfer_queue.errors import ConfigError


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    with same_signals():
        yield


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("10m", 600), ("1h30m", 5400), ("2d", 172800)])
def test_durations_are_read_as_kubectl_writes_them(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "1.5h", "1h 30m", "-3s"])
def test_what_is_no_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match="write for example 30s, 10m or 1h30m"):
        parse_duration(text)


POD = {
    "metadata": {"name": "q-controller-0"},
    "spec": {
        "containers": [
            {"ports": [{"name": "transferqueue", "containerPort": 50060}, {"name": "metrics", "containerPort": 9090}]}
        ]
    },
}


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ([], [("transferqueue", 50060, 50060), ("metrics", 9090, 9090)]),
        (["metrics"], [("metrics", 9090, 9090)]),
        (["9090"], [("metrics", 9090, 9090)]),
        (["8080:metrics"], [("metrics", 9090, 8080)]),
        ([":50060"], [("transferqueue", 50060, 0)]),
    ],
)
def test_ports_are_chosen_by_name_or_number(wanted: list[str], chosen: list[Any]) -> None:
    assert choose_ports(POD, wanted) == chosen


def sharded_pod() -> dict[str, Any]:
    made = desired_children(queue("{backend: {simple: {}}, controller: {shards: 12}}"), IMAGES)
    (deployment,) = (child for child in made if child["kind"] == "Deployment")
    pod: dict[str, Any] = deployment["spec"]["template"]
    return {**pod, "metadata": {"name": "q-controller-0", "uid": "u"}}


def test_each_shard_has_a_port_for_clients_and_one_for_metrics() -> None:
    pod = sharded_pod()
    chosen = [port.remote for port in choose_ports(pod, []) if is_controller_port(port.name)]
    assert chosen == [*range(50060, 50072)]
    assert list(_metrics_ports(pod).values()) == [*range(9060, 9072)]
    assert list(_metrics_ports(pod))[:3] == ["metrics", "metrics-1", "metrics-2"]


def test_logs_of_one_shard_are_enough(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Logs:
        """Of a pod in which a single container was started again."""

        namespace = "rl"

        @property
        def cluster(self) -> Logs:
            return self

        def queue(self, _: str | None) -> dict[str, Any]:
            return {"metadata": {"name": "q"}}

        def pods(self, *_: str | None) -> list[dict[str, Any]]:
            return [sharded_pod()]

        def read(self, _: str, query: list[tuple[str, str]]) -> str:
            if ("container", "controller-1") in query:
                return "2026-01-01T00:00:00Z the last words\n"
            raise ClusterError("previous terminated container not found")

    monkeypatch.setattr("tq_operator.kubectl.access.connect", lambda *_: Logs())
    assert main(["logs", "--previous"]) == 0
    assert capsys.readouterr().out == "q-controller-0/controller-1  the last words\n"


@pytest.mark.parametrize("text", ["rpc", "1", "x:metrics", "70000:metrics", ""])
def test_a_port_that_the_pod_has_not_is_refused_with_those_it_has(text: str) -> None:
    with pytest.raises(ConfigError, match=r"with one of: transferqueue \(50060\), metrics \(9090\)"):
        choose_ports(POD, [text])


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


@pytest.mark.parametrize(
    ("age", "state", "words"),
    [
        (timedelta(), "ok", "ends "),
        (LIFETIME * 0.9, "warn", "was not renewed"),
        (LIFETIME * 1.1, "fail", "is not valid now"),
        (-LIFETIME, "fail", "is not valid now"),
    ],
)
def test_the_age_of_the_certificate_is_judged(authority: Authority, age: timedelta, state: str, words: str) -> None:
    pair = authority.issue("hook", "hook", hosts=("hook.system.svc",))
    secret = {"metadata": {"namespace": "system", "name": "hook"}, "data": {"tls.crt": encoded(pair.certificate)}}
    bundle = encoded(authority.files.certificate)
    found = certificate_findings(secret, [bundle], datetime.now(timezone.utc) + age)
    assert (found.state, words in found.text) == (state, True)
    assert bool(found.fix) == (state != "ok")


def test_a_certificate_of_another_authority_is_told_about(authority: Authority, tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("hook", "hook")
    secret = {"metadata": {"namespace": "system", "name": "hook"}, "data": {"tls.crt": encoded(pair.certificate)}}
    found = certificate_findings(secret, [encoded(authority.files.certificate)], datetime.now(timezone.utc))
    assert "not signed by the authority in the webhook configurations" in found.text
    broken = certificate_findings({**secret, "data": {}}, [], datetime.now(timezone.utc))
    assert "holds no certificate" in broken.text


@pytest.mark.parametrize(
    ("words", "offered", "directive"),
    [
        (["fail"], {"failover"}, ":4"),
        (["failover", "--part", ""], {"controller", "mooncake-master", "mooncake-masters"}, ":4"),
        (["status", "--out"], {"--output"}, ":4"),
        (["status", "-o", ""], {"table", "json", "yaml"}, ":4"),
        (["inject", "-f", ""], set(), ":0"),
    ],
)
def test_completion_offers_what_may_come_next(
    words: list[str],
    offered: set[str],
    directive: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_KUBECTL_TQ_COMPLETE", "_TYPER_COMPLETE_ARGS", "_TYPER_COMPLETE_FISH_ACTION"):
        monkeypatch.setenv(name, "")  # restored afterwards
    assert complete(words) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert {line.split("\t")[0] for line in lines} == offered
    assert last == directive


@pytest.mark.parametrize("more", [[], ["--context", "other"]])
def test_a_kubeconfig_that_is_not_there_is_named_with_the_fix(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--kubeconfig", str(tmp_path / "none"), *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no usable kubeconfig")
    assert "--kubeconfig" in line


def test_contradicting_and_missing_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--follow", "--previous"]) == 2
    assert "exclude each other" in capsys.readouterr().err
    assert main(["inject", "-f", "pod.yaml"]) == 2
    assert "say --dry-run" in capsys.readouterr().err


def test_doctor_knows_a_fix_for_every_reason_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operator.md").read_text()
    table = page[page.index("| reason | what to do |") : page.index("Events repeat what conditions say")]
    reasons = {name for cell in re.findall(r"^\| (`.+?) \|", table, re.M) for name in re.findall(r"`(\w+)`", cell)}
    assert len(reasons) > 10
    assert reasons - FIXES.keys() == set()


HOSTILE = "s3://x\x1b[2J\u202e\r\nok   controller: [red]forged"


def test_texts_of_others_reach_no_terminal_as_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    seen = {
        "name": "q",
        "namespace": "n",
        "backend": HOSTILE,
        "transport": "",
        "generation": 2,
        "observedGeneration": 1,
        "conditions": [{"type": "Degraded", "status": "True", "reason": "Broken", "message": HOSTILE}],
        "parts": [],
        "leader": HOSTILE,
        "endpoints": {"controller": HOSTILE},
        "storage": {"ready": 1, "replicas": 1, "used": HOSTILE, "capacity": "1Gi"},
        "lastCheckpoint": {"time": "2026-01-01T00:00:00Z", "rows": 1, "url": HOSTILE, "error": HOSTILE},
        "injected": 0,
        "bindings": [{"namespace": "n", "name": "b", "bound": "True", "reason": HOSTILE, "message": ""}],
    }
    findings = [Finding("controller", "fail", HOSTILE, HOSTILE)]
    for draw in (lambda: draw_overview(seen), lambda: draw_findings(findings), lambda: [HOSTILE]):
        show(seen, Output.table, draw)
    said = capsys.readouterr().out
    said += _written(HOSTILE.replace("\n", ""), Redactor()) + _written({"log": HOSTILE}, Redactor())
    assert said.count("[2J") == 13
    assert all(line.isprintable() and not line.startswith("ok   ") for line in said.split("\n")), said


def test_a_port_is_forwarded_from_an_address_of_ipv6_too() -> None:
    access = Access(client.Configuration(), "rl")
    with Forwarder(access, lambda: "q-controller", 50060, host="::1") as forwarder:
        assert forwarder.address == f"[::1]:{forwarder.local}"
