from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.integration.mooncake.conftest import FREE_PORTS
from tests.waiting import wait_until
from transfer_queue.errors import ConfigError, StartError
from transfer_queue.storage.mooncake.admin import Admin
from transfer_queue.storage.mooncake.master import MasterProcess
from transfer_queue.storage.mooncake.settings import MasterSettings


def processes_of(pid: int) -> list[psutil.Process]:
    return [each for each in psutil.Process(pid).children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]


def test_started_master_serves_on_three_distinct_ports_and_stop_leaves_no_process(own_master: MasterProcess) -> None:
    before = {each.pid for each in processes_of(os.getpid())}
    endpoints = own_master.start()
    addresses = {endpoints.master_server_address, endpoints.admin_address, endpoints.metadata_server.split("/")[2]}
    assert len(addresses) == 3
    for address in addresses:
        host, port = address.rsplit(":", 1)
        socket.create_connection((host, int(port)), timeout=5).close()
    assert Admin(endpoints.admin_address).ready()
    assert own_master.poll() is None
    pid = own_master.pid
    own_master.stop()
    own_master.stop()
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert {each.pid for each in processes_of(os.getpid())} <= before


@pytest.mark.parametrize("setting", ["rpcPort", "httpMetadataPort", "metricsPort"])
def test_port_in_use_is_named_with_its_setting(tmp_path: Path, setting: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = MasterProcess(MasterSettings(**{**FREE_PORTS, setting: port}), tmp_path / "log")
        with pytest.raises(StartError) as caught:
            process.start()
    assert str(port) in str(caught.value)
    assert f"master.{setting}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert process.pid is None


def test_master_that_dies_at_once_is_reported_with_its_last_words(tmp_path: Path) -> None:
    settings = MasterSettings(**FREE_PORTS, host="192.0.2.1")  # documentation address: no interface has it
    process = MasterProcess(settings, tmp_path / "log")
    with pytest.raises(StartError, match=r"192\.0\.2\.1.*master\.rpcPort"):
        process.start()

    class LateConflict(MasterProcess):
        """The port is taken after it was checked."""

        def _launch(self, binary: str, flags: dict[str, object]) -> None:
            self.thief = socket.socket()
            self.thief.bind(("127.0.0.1", int(str(flags["rpc_port"]))))
            self.thief.listen()
            super()._launch(binary, flags)

    late = LateConflict(MasterSettings(**FREE_PORTS), tmp_path / "log")
    with pytest.raises(StartError, match="mooncake_master ended at once") as caught:
        late.start()
    late.thief.close()
    assert "\n" not in str(caught.value)
    assert "exit status" in str(caught.value)
    assert late.poll() is not None


def test_damaged_library_gives_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libibverbs.so.1").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(StartError, match=r"libibverbs\.so\.1.*apt-get install libibverbs1$"):
        MasterProcess(MasterSettings(**FREE_PORTS), tmp_path / "log").start()


def test_missing_binary_gives_the_command_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="mooncake_master cannot be started"):
        MasterProcess(MasterSettings(**FREE_PORTS), tmp_path / "log", binary=str(tmp_path / "absent")).start()


def test_a_binary_that_does_not_answer_is_given_as_long_as_a_start(tmp_path: Path) -> None:
    binary = tmp_path / "mooncake_master"
    binary.write_text("#!/bin/sh\nexec sleep 600\n")
    binary.chmod(0o755)
    with pytest.raises(StartError, match=r"did not say within 0\.2 s which flags it knows"):
        MasterProcess(MasterSettings(**FREE_PORTS, startTimeout=0.2), tmp_path / "log", binary=str(binary)).start()


def test_unknown_interface_is_refused_with_the_existing_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rpcInterface.*nosuch.*lo"):
        MasterProcess(MasterSettings(**FREE_PORTS, rpcInterface="nosuch0"), tmp_path / "log").start()


OWNER = """
import sys, time, threading
from transfer_queue.storage.mooncake.master import MasterProcess
from transfer_queue.storage.mooncake.settings import MasterSettings
process = MasterProcess(MasterSettings(rpcPort=0, httpMetadataPort=0, metricsPort=0), sys.argv[1])
starter = threading.Thread(target=process.start)   # a thread that ends must not take the master with it
starter.start(); starter.join()
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_master_ends_when_its_owner_is_killed(tmp_path: Path, kill: Callable[[int, int], None]) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert owner.stdout is not None
    master = psutil.Process(int(owner.stdout.readline()))
    started = processes_of(owner.pid)
    assert master in started
    kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_until(
        lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in started),
        "all of them ended",
    )
