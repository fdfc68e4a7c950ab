"""Fourteen real machines: distances as recorded, and the choice that an engineer of the machine would make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.fabric.trees import DATA, build, facts_of, nccl_topology, recorded
from transfer_queue.fabric import Decision, Distance, Fabric, read_fabric, resolve
from transfer_queue.fabric.resolve import Resolution

MACHINES = sorted(path.stem for path in DATA.glob("*.json"))


def _own_domains(root: Path) -> Resolution:
    build(facts_of("azure-ndv4-8g-8n"), root, own_domains=True)
    return resolve(root)


def _topology_file(root: Path) -> Resolution:
    facts = facts_of("azure-ndv4-8g-8n")
    build(facts, root, own_domains=True)
    return resolve(root, {"NCCL_TOPO_FILE": str(nccl_topology(facts, root / "topology.xml"))})


def _one_gpu_of_eight(root: Path) -> Resolution:
    """A container that was given GPU 5 and can open every HCA."""
    build(facts_of("a800-vm-8g-8bond"), root)
    (root / "dev/nvidia5").touch()
    return resolve(root)


VARIANTS: dict[str, Callable[[Path], Resolution]] = {
    "azure-ndv4-8g-8n+own-domains": _own_domains,
    "azure-ndv4-8g-8n+topology-file": _topology_file,
    "a800-vm-8g-8bond+one-gpu": _one_gpu_of_eight,
}


def measured(fabric: Fabric) -> dict[tuple[str, str], Distance | None]:
    return {(gpu.name, hca.name): fabric.distance(gpu, hca) for gpu in fabric.gpus for hca in fabric.hcas}


def render(decision: Decision) -> list[str]:
    """The lines of an expected file."""
    choice = decision.choice
    assert choice is not None
    lines = []
    for c in choice.gpus:
        distance = "?" if c.distance is None else c.distance.name
        lines.append(f"{c.gpu.name} {','.join(c.hcas)} {distance}: {c.reason}")
    lines += [f"- {e.hca} [{e.rule}] {e.reason}" for e in choice.excluded]
    lines += [f"! {warning}" for warning in decision.warnings]
    return lines


def expected(name: str) -> list[str]:
    lines = (DATA / "expected" / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_there_are_fourteen_machines_and_every_expected_file_belongs_to_a_test() -> None:
    assert len(MACHINES) == 14
    assert {path.stem for path in (DATA / "expected").iterdir()} == {*MACHINES, *VARIANTS}


@pytest.mark.parametrize("machine", MACHINES)
def test_distances_read_back_as_recorded(machine: str, tmp_path: Path) -> None:
    facts = facts_of(machine)
    build(facts, tmp_path)
    assert measured(read_fabric(tmp_path)) == recorded(facts)


@pytest.mark.parametrize("machine", MACHINES)
def test_with_reported_numa_numbers_only_sys_inside_one_node_becomes_node(machine: str, tmp_path: Path) -> None:
    facts = facts_of(machine)
    build(facts, tmp_path, reported_numa=True)
    fabric = read_fabric(tmp_path)
    numa = {**{gpu.name: gpu.numa for gpu in fabric.gpus}, **{hca.name: hca.numa for hca in fabric.hcas}}
    for (gpu, nic), distance in recorded(facts).items():
        inside = distance is Distance.SYS and numa[gpu] == numa[nic] >= 0
        assert measured(fabric)[gpu, nic] is (Distance.NODE if inside else distance)


@pytest.mark.parametrize("machine", MACHINES)
def test_choice_and_reasons_are_those_of_an_engineer(machine: str, tmp_path: Path) -> None:
    build(facts_of(machine), tmp_path)
    assert render(resolve(tmp_path).decision) == expected(machine)


@pytest.mark.parametrize("variant", VARIANTS)
def test_choice_in_variants_of_the_machines(variant: str, tmp_path: Path) -> None:
    assert render(VARIANTS[variant](tmp_path).decision) == expected(variant)
