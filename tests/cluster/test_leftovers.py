"""Whatever happens to the tool or to the cluster, nothing stays on the machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.binaries import build_binaries
from tests.cluster.cluster import Cluster, down, require_cluster, status, up
from tests.cluster.errors import ClusterError
from tests.cluster.lock import exclusive
from tests.cluster.node import SANDBOX_IMAGE
from tests.cluster.paths import REPOSITORY, STATE_VARIABLE, state_folder

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
alone = pytest.mark.usefixtures("no_cluster")
# These bring a cluster up, or take the one that the test before left: a start is what most of the time goes to.
in_turn = pytest.mark.usefixtures("own_machine")

TOOL = [sys.executable, "-m", "tests.cluster"]
DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class Traces:
    """What the machine shows of a cluster, looked up without the tool's own means."""

    processes: frozenset[str]
    mounts: frozenset[str]
    control_groups: frozenset[str]
    links: frozenset[str]
    network_namespaces: int
    state_exists: bool


def traces() -> Traces:
    """Look at the machine now."""
    processes, namespaces = set(), set()
    marks = (str(state_folder()).encode(), str(build_binaries()).encode(), b"node_init.sh")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
                namespaces.add(os.readlink(entry / "ns" / "net"))
            except OSError:
                continue
            if any(mark in command for mark in marks):
                processes.add(command.replace(b"\0", b" ").decode())
    words = ("transferqueue", "containerd", "kubelet", "cni")
    mounts = {
        line for line in Path("/proc/self/mounts").read_text().splitlines() if any(word in line for word in words)
    }
    groups = {str(path) for path in Path("/sys/fs/cgroup").rglob("*") if path.is_dir() and "transferqueue" in path.name}
    links = {path.name for path in Path("/sys/class/net").iterdir()}
    return Traces(
        frozenset(processes),
        frozenset(mounts),
        frozenset(groups),
        frozenset(links),
        len(namespaces),
        state_folder().exists(),
    )


def start_tool(*arguments: str) -> subprocess.Popen[str]:
    """Run the tool as a process of its own."""
    return subprocess.Popen([*TOOL, *arguments], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition` holds, or fail the test."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@alone
def test_down_removes_a_cluster_with_running_pods_and_leaves_nothing() -> None:
    before = traces()
    cluster = up()
    for node in cluster.nodes:
        run_pause_pod(cluster, node.name)
    assert traces() != before
    down()
    assert traces() == before


@alone
def test_down_after_the_tool_was_killed_in_a_half_start_leaves_nothing() -> None:
    before = traces()
    tool = start_tool("up")
    wait_for(lambda: (state_folder() / "log" / "node1-kubelet.log").exists(), "kubelet never started")
    tool.kill()
    tool.communicate()
    assert traces().processes, "the start had left no process that could be forgotten"
    down()
    assert traces() == before


@alone
def test_a_start_that_is_terminated_cleans_up_after_itself() -> None:
    before = traces()
    tool = start_tool("up")
    wait_for(lambda: (state_folder() / "log" / "kube-apiserver.log").exists(), "the API server never started")
    tool.terminate()
    tool.communicate()
    assert tool.returncode == 128 + signal.SIGTERM
    assert traces() == before


@alone
def test_a_start_in_which_a_program_dies_names_it_shows_its_log_and_cleans_up() -> None:
    before = traces()
    tool = start_tool("up")
    etcd = Cluster(build_binaries()).control_plane.components[0]
    wait_for(lambda: etcd.pid() and etcd.log.stat().st_size, "etcd never started")
    os.kill(etcd.pid() or 0, signal.SIGKILL)
    _, message = tool.communicate()
    assert tool.returncode == 1
    assert "error: etcd died" in message
    assert "etcd.log" in message
    assert '"level":"info"' in message, "the message shows no line of etcd's log"
    assert traces() == before


@in_turn
def test_up_after_a_killed_start_replaces_what_it_left() -> None:
    down()
    tool = start_tool("up")
    wait_for(lambda: (state_folder() / "log" / "kube-apiserver.log").exists(), "the API server never started")
    tool.kill()
    tool.communicate()
    assert up().healthy()


@in_turn
def test_a_dead_program_shows_in_status_and_the_next_up_mends_it() -> None:
    cluster = up()
    os.kill(cluster.nodes[1].kubelet.pid() or 0, signal.SIGKILL)
    wait_for(lambda: cluster.nodes[1].kubelet.pid() is None, "the kubelet lives")
    table, healthy = status()
    assert not healthy
    assert "not running: node2-kubelet" in table
    assert up().healthy()


@in_turn
def test_up_on_a_healthy_cluster_changes_nothing() -> None:
    first = {component.name: component.pid() for component in up().components}
    assert {component.name: component.pid() for component in up().components} == first


@in_turn
def test_a_cluster_with_its_state_elsewhere_is_not_torn_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up()
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv(STATE_VARIABLE, str(tmp_path / "other"))
        with pytest.raises(ClusterError, match=f"{STATE_VARIABLE}="):
            down()
    assert require_cluster().healthy()


@in_turn
def test_down_ends_a_foreign_process_in_the_cluster_s_network() -> None:
    cluster = up()
    entered = ["nsenter", f"--net={cluster.nodes[0].host.namespace}", "sleep", "infinity"]
    with subprocess.Popen(entered) as guest:
        before = traces().network_namespaces
        down()
        assert guest.wait(DEADLINE_SECONDS) == -signal.SIGKILL
    assert traces().network_namespaces < before


@alone
def test_two_commands_at_once_are_refused_naming_the_process_at_work() -> None:
    with exclusive():
        done = subprocess.run([*TOOL, "up"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"process {os.getpid()}" in done.stderr


@alone
def test_a_state_folder_that_holds_other_files_is_refused_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    for command in (up, down):
        with pytest.raises(ClusterError, match="not a cluster's"):
            command()
    assert (tmp_path / "thesis.tex").read_text() == "precious"
    (tmp_path / "thesis.tex").unlink()


@alone
def test_env_without_a_cluster_says_how_to_start_one() -> None:
    done = subprocess.run([*TOOL, "env"], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "make cluster" in done.stderr


def run_pause_pod(cluster: Cluster, node: str) -> None:
    """Start a pod on `node` and wait until it runs."""
    container = {"name": "pause", "image": SANDBOX_IMAGE, "imagePullPolicy": "Never"}
    name = f"pause-{node}"
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"nodeName": node, "containers": [container]},
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=60s")
