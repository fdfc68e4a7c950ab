"""The real Mooncake library reads our topology file the way we mean it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.fabric.trees import build, facts_of
from transfer_queue.fabric import document, resolve

pytest.importorskip("mooncake.engine", reason="needs mooncake-transfer-engine")

_PROGRAM = "from mooncake.engine import TransferEngine; print(TransferEngine().get_local_topology())"


def mooncake_log(topology: Path) -> str:
    """What Mooncake logs while it sets up with this topology, in a process of its own: it may exit hard."""
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={"MC_CUSTOM_TOPO_JSON": str(topology), "MC_LOG_LEVEL": "INFO", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return result.stdout + result.stderr


def test_every_hca_of_the_topology_reaches_the_rdma_transport(tmp_path: Path) -> None:
    build(facts_of("dgx1-v100-8g-4n"), tmp_path)
    path = tmp_path / "topology.json"
    path.write_text(json.dumps(document(resolve(tmp_path))["topology"]))
    log = mooncake_log(path)
    assert "Found 4 HCAs" in log
    assert "tcp_transport" not in log


def test_mooncake_goes_on_over_tcp_where_a_location_has_no_second_list(tmp_path: Path) -> None:
    """Why the shape of the file matters, and why the policy required does not rely on it."""
    path = tmp_path / "topology.json"
    path.write_text(json.dumps({"cpu:0": [["mlx5_0"]]}))
    log = mooncake_log(path)
    assert "Found 0 HCAs" in log
    assert "TcpTransport: listen" in log
