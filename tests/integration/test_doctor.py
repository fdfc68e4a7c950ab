"""``tq doctor`` with faults planted for real: it names the right one, says the fix, and blames nothing else."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.queue_command import free_ports
from tests.integration.stack import ROOT, Process, Stack, running_stack
from tests.unit.fabric.trees import PortSpec, Tree
from transfer_queue.cli.doctor_machine import MINIMUM_VERSIONS
from transfer_queue.storage.mooncake.master import MasterProcess
from transfer_queue.storage.mooncake.settings import MasterSettings

pytestmark = pytest.mark.timeout(600)  # each test starts processes, on whatever machine
Findings = list[dict[str, str]]


class Doctor:
    """The command in a world of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {key: value for key, value in os.environ.items() if not key.upper().endswith("_PROXY")}
        self.environ.update(XDG_STATE_HOME=str(folder / "state"), PYTHONPATH=str(ROOT))
        self.ports = free_ports(6)

    def run(self, *arguments: str, through: tuple[str, ...] = ()) -> tuple[int, Findings]:
        done = self.start(*arguments, "--output", "json", through=through)
        assert done.stdout.startswith("["), done.stderr
        return done.returncode, json.loads(done.stdout)

    def start(self, *arguments: str, through: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        command = [*through, sys.executable, "-m", "transfer_queue.cli", "doctor", *arguments]
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=250, check=False)

    def resource(self, backend: dict[str, Any] | None = None, **storage: Any) -> str:
        file = self.folder / "queue.yaml"
        spec = {
            "backend": backend or {"simple": {}},
            "controller": {"port": self.ports, "metricsPort": self.ports + 1},
            "storage": {
                "replicas": 1,
                "port": self.ports + 2,
                "metricsPort": self.ports + 3,
                "capacity": "16Mi",
                **storage,
            },
        }
        metadata = {"name": "planned"}
        document = {
            "apiVersion": "transferqueue.io/v1alpha1",
            "kind": "TransferQueue",
            "metadata": metadata,
            "spec": spec,
        }
        file.write_text(yaml.safe_dump(document))
        return str(file)


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path)


@pytest.fixture(scope="module")
def healthy() -> Iterator[Stack]:
    with running_stack(units=1) as stack:
        yield stack


def only(findings: Findings, check: str, state: str, text: str, fix: str) -> None:
    """Exactly the findings of ``check`` are not ok, and one of them says ``text`` and ``fix``."""
    wrong = [finding for finding in findings if finding["state"] != "ok"]
    assert {finding["check"] for finding in wrong} == {check}, wrong
    assert any(f["state"] == state and text in f["text"] and fix in f["fix"] for f in wrong), wrong


def test_a_healthy_machine_with_a_healthy_queue_has_no_complaints(doctor: Doctor, healthy: Stack) -> None:
    code, findings = doctor.run("--controller", healthy.address, "-f", doctor.resource())
    assert [finding for finding in findings if finding["state"] != "ok"] == []
    assert code == 0
    assert {"python", "packages", "controller", "storage units", "ports", "rdma", "clock"} <= {
        f["check"] for f in findings
    }


def test_people_get_a_line_each_with_the_fix_below(doctor: Doctor) -> None:
    done = doctor.start("--controller", f"127.0.0.1:{doctor.ports}")
    lines = done.stdout.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("fail controller: cannot reach"))
    assert lines[place + 1].startswith("      fix: check that it runs")
    assert lines[-1].endswith("1 failures")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_no_mooncake_master(doctor: Doctor) -> None:
    (doctor.folder / "bare" / "mooncake").mkdir(parents=True)
    (doctor.folder / "bare" / "mooncake" / "__init__.py").touch()
    doctor.environ.update(PATH="/usr/bin:/bin", PYTHONPATH=f"{doctor.folder / 'bare'}:{ROOT}")
    backend = {"mooncake": {"protocol": "tcp", "globalSegmentSize": "16Mi"}}
    code, findings = doctor.run("-f", doctor.resource(backend))
    only(findings, "mooncake", "fail", "mooncake_master is not installed", "pip install")
    assert code == 1


def test_a_port_in_use(doctor: Doctor) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", doctor.ports))
        taken.listen()
        code, findings = doctor.run("-f", doctor.resource())
    only(findings, "ports", "fail", f"port {doctor.ports} (spec.controller.port)", "set another spec.controller.port")
    assert f"pid {os.getpid()}" in next(f["text"] for f in findings if f["check"] == "ports")
    assert code == 1


def test_few_files_may_be_open(doctor: Doctor) -> None:
    code, findings = doctor.run(through=("sh", "-c", 'ulimit -n 300; exec "$@"', "sh"))
    only(findings, "limits", "fail", "only 300 files may be open", "ulimit -n 65536")
    assert code == 1


def test_a_small_shared_memory(doctor: Doctor) -> None:
    mount = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"'
    inside = ("unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh")
    code, findings = doctor.run("-f", doctor.resource(), through=inside)
    only(findings, "shared memory", "warn", "8.0 MiB free of 8.0 MiB", "lower spec.storage.capacity")
    assert code == 0
    code, findings = doctor.run(through=inside)
    only(findings, "shared memory", "warn", "only small blocks", "--shm-size")
    assert code == 0


def test_an_rdma_port_that_is_down(doctor: Doctor) -> None:
    tree = Tree(doctor.folder / "machine")
    tree.gpu(["pci0000:00", "0000:00:01.0", "0000:01:00.0"])
    tree.hca("mlx5_0", ["pci0000:00", "0000:00:01.0", "0000:01:00.1"])
    tree.hca("mlx5_1", ["pci0000:00", "0000:00:02.0", "0000:02:00.0"], ports=[PortSpec(state="1: DOWN")])
    code, findings = doctor.run("--root", str(tree.root))
    only(findings, "rdma", "warn", "mlx5_1 is not used", "cable")
    assert "GPU0 uses mlx5_0 (PIX)" in [finding["text"] for finding in findings]
    assert code == 0


def test_a_wrong_config_file(doctor: Doctor) -> None:
    wrong = doctor.folder / "attach.yaml"
    wrong.write_text("controler: {addresses: ['127.0.0.1:1']}\n")
    doctor.environ["TQ_CONFIG_FILE"] = str(wrong)
    code, findings = doctor.run()
    only(
        findings,
        "settings",
        "fail",
        'unknown field "controler"; did you mean controller? allowed: controller',
        "correct the file",
    )
    assert code == 1


def test_a_variable_that_is_no_number(doctor: Doctor, healthy: Stack) -> None:
    doctor.environ.update(TQ_CONTROLLER_ADDRESS=healthy.address, TQ_PUT_WAIT="soon")
    code, findings = doctor.run()
    only(findings, "settings", "fail", "TQ_PUT_WAIT: 'soon' is not a number of seconds", "correct the variable")
    assert code == 1


def test_a_controller_that_cannot_be_reached(doctor: Doctor) -> None:
    doctor.environ["TQ_CONTROLLER_ADDRESS"] = f"127.0.0.1:{doctor.ports}"
    code, findings = doctor.run()
    only(findings, "controller", "fail", "cannot reach the controller at 127.0.0.1", "check that it runs")
    assert code == 1


@contextmanager
def planted(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> Iterator[str]:
    monkeypatch.setenv("PLANTED", fault)
    settings = {"port": 0, "metricsPort": 0, "backend": {"kind": "simple"}, **config}
    process = Process("tests.integration.planted_controller", settings, folder, "controller").wait_ready()
    try:
        yield process.ready["address"]
    finally:
        process.stop()


def test_another_version_at_the_controller(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    with planted("protocol", doctor.folder, monkeypatch) as address:
        code, findings = doctor.run("--controller", address)
    only(findings, "controller", "fail", "versions differ: this server speaks protocol 99", "install the same version")
    assert code == 1


def test_a_clock_that_is_wrong(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    with planted("clock", doctor.folder, monkeypatch) as address:
        code, findings = doctor.run("--controller", address)
    only(findings, "clock", "warn", "s ahead of the controller's", "chrony")
    assert code == 0


def test_no_storage_unit(doctor: Doctor) -> None:
    with running_stack(units=0, expectedUnits=2) as stack:
        code, findings = doctor.run("--controller", stack.address)
    only(findings, "storage units", "fail", "0 of 2 storage units are connected", "kubectl get pods")
    assert code == 1


def test_a_package_that_is_too_old(doctor: Doctor) -> None:
    old = doctor.folder / "old" / "tensordict-0.1.0.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: tensordict\nVersion: 0.1.0\n")
    doctor.environ["PYTHONPATH"] = f"{old.parent}:{ROOT}"
    code, findings = doctor.run()
    only(findings, "packages", "fail", "tensordict 0.1.0 is too old", "pip install -U 'tensordict>=0.10'")
    assert code == 1


def test_a_metadata_server_that_is_away(doctor: Doctor) -> None:
    master = MasterProcess(MasterSettings(rpc_port=0, http_metadata_port=0, metrics_port=0), doctor.folder / "log")
    settings = {**master.start().settings(), "metadataServer": f"http://127.0.0.1:{doctor.ports}/metadata"}
    try:
        with running_stack(units=0, backend={"kind": "mooncake", "settings": settings}) as stack:
            code, findings = doctor.run("--controller", stack.address)
    finally:
        master.stop()
    only(findings, "metadata server", "fail", "Connection refused", "HTTP metadata server")
    assert code == 1


def test_a_mooncake_master_that_is_away(doctor: Doctor) -> None:
    settings = {"masterServerAddress": f"127.0.0.1:{doctor.ports}"}
    with running_stack(units=0, backend={"kind": "mooncake", "settings": settings}) as stack:
        code, findings = doctor.run("--controller", stack.address)
    only(findings, "mooncake_master", "fail", "Connection refused", "start the mooncake_master")
    assert code == 1


def test_a_proxy_between_mooncake_and_its_metadata_server(doctor: Doctor) -> None:
    doctor.environ["http_proxy"] = "http://127.0.0.1:9"
    backend = {"mooncake": {"protocol": "tcp", "globalSegmentSize": "16Mi"}}
    code, findings = doctor.run("-f", doctor.resource(backend))
    only(findings, "proxy", "warn", "http_proxy is set", "export no_proxy=")
    assert code == 0


def test_a_state_folder_that_is_a_file(doctor: Doctor) -> None:
    (doctor.folder / "state").write_text("")
    code, findings = doctor.run()
    only(findings, "state folder", "fail", "is not a folder", "XDG_STATE_HOME")
    assert code == 1


def test_a_wrong_resource(doctor: Doctor) -> None:
    code, findings = doctor.run("-f", doctor.resource(replicas=-1))
    only(findings, "resource", "fail", "spec.storage.replicas", "correct")
    assert code == 1


def test_more_memory_planned_than_there_is(doctor: Doctor) -> None:
    backend = {"mooncake": {"protocol": "tcp", "globalSegmentSize": "900Ti"}}
    code, findings = doctor.run("-f", doctor.resource(backend))
    only(findings, "memory", "fail", "the storage units may take 900.0 TiB", "lower the capacity")
    assert code == 1


def test_the_oldest_versions_are_those_that_the_package_asks_for() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for name, version in MINIMUM_VERSIONS.items():
        assert f'"{name}>={version}"' in text
