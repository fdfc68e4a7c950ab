"""The command line as a container runs it, and the files it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.fabric.trees import PortSpec, Tree, build, facts_of

ROOT = Path(__file__).parents[3]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA", "NVIDIA", "NCCL", "MC_"))}
    return subprocess.run(
        [sys.executable, "-m", "transfer_queue.fabric", *arguments],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def hgx(tmp_path: Path) -> Path:
    build(facts_of("hgx-8g-12n-ibstat"), tmp_path / "machine")
    return tmp_path / "machine"


def test_the_table_shows_matrix_choice_exclusions_and_decision(hgx: Path) -> None:
    result = run("--root", str(hgx))
    assert result.returncode == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "GPU4 SYS SYS SYS SYS SYS SYS PIX* PIX PIX NODE NODE NODE" in lines
    assert "GPU4 mlx5_6 nearest at PIX; as near or nearer but excluded: mlx5_7, mlx5_8" in lines
    assert any(line.startswith("mlx5_1 ") and "excluded (not-active): port 1 is DOWN" in line for line in lines)
    assert lines[-1].startswith("policy auto: rdma (using mlx5_0,mlx5_3,")


def test_the_document_tells_programs_the_same(hgx: Path) -> None:
    document = json.loads(run("--root", str(hgx), "--json", CUDA_VISIBLE_DEVICES="4").stdout)
    assert document["deviceName"] == "mlx5_6"
    assert document["gpus"][4]["distances"]["mlx5_7"] == "PIX"
    assert document["gpus"][4]["cudaIndex"] == 0
    assert document["hcas"][7] == {
        "name": "mlx5_7",
        "address": document["hcas"][7]["address"],
        "numa": 1,
        "linkLayer": "Ethernet",
        "state": "ACTIVE",
        "rate": 100.0,
        "gids": document["hcas"][7]["gids"],
        "netdevs": ["net15"],
        "usable": False,
        "rule": "ethernet",
        "reason": "Ethernet beside InfiniBand: another network, for management or storage",
    }


def test_resolve_writes_files_that_a_shell_and_mooncake_can_read(hgx: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("resolve", "--root", str(hgx), "--out", str(out), "--policy", "required", CUDA_VISIBLE_DEVICES="1,0")
    assert result.returncode == 0, result.stderr
    script = f"set -a; . {out}/fabric.env; echo $TQ_RDMA_TRANSPORT $TQ_RDMA_DEVICES $MC_MS_AUTO_DISC"
    shell = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert shell.stdout.split() == ["rdma", "mlx5_3,mlx5_0", "0"]
    topology = json.loads((out / "mooncake-topology.json").read_text())
    assert topology["cuda:0"][0] == ["mlx5_3"]
    assert all(len(lists) == 2 for lists in topology.values())
    assert json.loads((out / "fabric.json").read_text())["transport"] == "rdma"
    assert sorted(path.name for path in out.iterdir()) == ["fabric.env", "fabric.json", "mooncake-topology.json"]


def test_failover_hands_over_the_topology_and_is_refused_where_rdma_is_required(hgx: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("resolve", "--root", str(hgx), "--out", str(out), "--failover", CUDA_VISIBLE_DEVICES="0").returncode == 0
    lines = dict(line.split("=", 1) for line in (out / "fabric.env").read_text().splitlines())
    assert lines["TQ_RDMA_DEVICES"] == "''"
    assert lines["MC_MS_AUTO_DISC"] == "1"
    assert lines["MC_CUSTOM_TOPO_JSON"] == str(out / "mooncake-topology.json")
    assert set(lines["MC_MS_FILTERS"].split(",")) == {f"mlx5_{i}" for i in (0, 3, 4, 5, 6, 9, 10, 11)}
    refused = run("resolve", "--root", str(hgx), "--out", str(out), "--failover", "--policy", "required")
    assert refused.returncode == 2
    assert "--failover needs Mooncake's auto-discovery" in refused.stderr


def test_required_without_a_device_ends_with_1_and_one_line(tmp_path: Path) -> None:
    result = run("--root", str(tmp_path), "--policy", "required")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "no InfiniBand device found under /sys/class/infiniband" in result.stderr
    out = tmp_path / "out"
    assert run("resolve", "--root", str(tmp_path), "--policy", "required", "--out", str(out)).returncode == 1
    assert (out / "fabric.env").read_text() == "TQ_RDMA_TRANSPORT=refused\nTQ_RDMA_DEVICES=''\n"


def test_a_wrong_topology_file_ends_with_2_and_names_it(tmp_path: Path) -> None:
    result = run("--root", str(tmp_path), "--topology-file", "/nowhere.xml")
    assert result.returncode == 2
    assert "topology file /nowhere.xml cannot be read" in result.stderr


def test_the_core_imports_nothing_beyond_the_standard_library(tmp_path: Path) -> None:
    Tree(tmp_path).hca("mlx5_0", None, ports=[PortSpec()])
    code = (
        "import sys; before = set(sys.modules); import transfer_queue.fabric; "
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'transfer_queue'}))"
    )
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"
