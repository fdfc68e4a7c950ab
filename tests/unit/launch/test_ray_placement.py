from __future__ import annotations

import subprocess
import sys

import pytest

from transfer_queue.errors import ConfigError
from transfer_queue.launch.ray_placement import NodeView, RaySettings, place_units, view_nodes

HEAD = NodeView("head", {"CPU": 8, "node:__internal_head__": 1})
BIG = NodeView("big", {"CPU": 8, "disk": 2})
SMALL = NodeView("small", {"CPU": 0.5})
GPU = NodeView("gpu", {"CPU": 16, "GPU": 8})


def test_units_go_round_robin_over_the_nodes_but_not_to_the_head() -> None:
    assert place_units([HEAD, BIG, GPU], 5, RaySettings(), None) == ["big", "gpu", "big", "gpu", "big"]


def test_the_head_takes_units_where_it_is_alone_or_allowed() -> None:
    assert place_units([HEAD], 2, RaySettings(), None) == ["head", "head"]
    assert place_units([HEAD, BIG], 2, RaySettings(use_head_node=True), None) == ["head", "big"]
    assert place_units([HEAD, SMALL], 1, RaySettings(), None) == ["head"]


def test_units_keep_to_nodes_with_the_required_resource() -> None:
    assert place_units([HEAD, BIG, GPU], 2, RaySettings(), "disk") == ["big", "big"]


def test_a_resource_that_no_node_offers_is_named_with_those_offered() -> None:
    with pytest.raises(ConfigError, match="'tape'; offered: CPU, GPU, disk"):
        place_units([HEAD, BIG, GPU], 1, RaySettings(), "tape")


def test_nodes_without_the_cpus_are_refused_unless_none_are_reserved() -> None:
    with pytest.raises(ConfigError, match=r"ray\.num_cpus: no node .* has 1 CPUs"):
        place_units([SMALL], 1, RaySettings(), None)
    assert place_units([SMALL], 1, RaySettings(num_cpus=0), None) == ["small"]


def test_dead_nodes_are_not_considered() -> None:
    listed = [
        {"NodeID": "a", "Alive": False, "Resources": {}},
        {"NodeID": "b", "Alive": True, "Resources": {"CPU": 2.0}},
    ]
    assert [node.node_id for node in view_nodes(listed)] == ["b"]


def test_the_library_does_not_import_ray_by_itself() -> None:
    program = "import sys, transfer_queue as tq; tq.init, tq.kv_put, tq.get_client; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
