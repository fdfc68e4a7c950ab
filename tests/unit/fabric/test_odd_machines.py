"""Machines that mislead: each test builds one and states what has to be chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.fabric.trees import PortSpec, Tree, gids
from transfer_queue.errors import ConfigError
from transfer_queue.fabric import Choice, Fabric, Selectors, choose, read_fabric, read_topology, read_traffic, resolve

INFINIBAND = PortSpec(rate="400 Gb/sec (4X NDR)")
ROCE = PortSpec(layer="Ethernet", rate="400 Gb/sec (4X NDR)")


def behind_switch(switch: int, slot: int, function: int = 0) -> tuple[str, ...]:
    """PCI path of a device on the given switch; every switch has a host bridge of its own."""
    bus = 0x10 * (switch + 1)
    return (
        f"pci0000:{bus:02x}",
        f"0000:{bus:02x}:01.0",
        f"0000:{bus + 1:02x}:00.0",
        f"0000:{bus + 2:02x}:{slot:02x}.0",
        f"0000:{bus + 3 + slot:02x}:00.{function}",
    )


def on_root_port(socket: int, slot: int, function: int = 0) -> tuple[str, ...]:
    """PCI path of a device without a switch, below one host bridge per socket."""
    bus = 0x80 * socket
    return (f"pci0000:{bus:02x}", f"0000:{bus:02x}:{slot:02x}.0", f"0000:{bus + slot:02x}:00.{function}")


def rails(tree: Tree, count: int = 4, port: PortSpec = INFINIBAND) -> None:
    """GPU and HCA ``rail<i>`` on switch i."""
    for switch in range(count):
        tree.gpu(behind_switch(switch, 0), minor=switch)
        tree.hca(f"rail{switch}", behind_switch(switch, 1), ports=[port])


def choice_of(tree: Tree, environment: dict[str, str] | None = None, **selectors: tuple[str, ...]) -> Choice:
    return choose(read_fabric(tree.root, environment), Selectors(**selectors))


def chosen(choice: Choice) -> dict[str, tuple[str, ...]]:
    return {c.gpu.name: c.hcas for c in choice.gpus}


def excluded(choice: Choice) -> dict[str, str]:
    return {e.hca: e.rule for e in choice.excluded}


def reason(choice: Choice, hca: str) -> str:
    return next(e.reason for e in choice.excluded if e.hca == hca)


def test_two_sockets_without_switches_keep_each_gpu_on_its_socket(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for socket in (0, 1):
        tree.gpu(on_root_port(socket, 1), socket)
        tree.gpu(on_root_port(socket, 2), socket)
        tree.hca(f"mlx5_{1 - socket}", on_root_port(socket, 3), socket)
    choice = choice_of(tree)
    assert chosen(choice) == {"GPU0": ("mlx5_1",), "GPU1": ("mlx5_1",), "GPU2": ("mlx5_0",), "GPU3": ("mlx5_0",)}
    assert [c.distance.name for c in choice.gpus if c.distance is not None] == ["PHB"] * 4
    assert choice.gpus[0].fallback == ("mlx5_0",)


def test_a_dead_port_loses_though_nearest(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    rails(tree)
    tree.hca("dead", behind_switch(0, 2), ports=[PortSpec("1: DOWN", rate="400 Gb/sec")])
    tree.hca("polling", behind_switch(1, 2), ports=[PortSpec("2: INIT", rate="400 Gb/sec")])
    choice = choice_of(tree)
    assert chosen(choice) == {f"GPU{i}": (f"rail{i}",) for i in range(4)}
    assert excluded(choice) == {"dead": "not-active", "polling": "not-active"}
    assert reason(choice, "polling") == "port 1 is INIT, not ACTIVE"


def test_the_gpu_of_a_dead_rail_takes_the_nearest_live_one(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu(behind_switch(0, 0), 0)
    tree.hca("rail0", behind_switch(0, 1), 0, ports=[PortSpec("1: DOWN")])
    tree.gpu(behind_switch(1, 0), 0)
    tree.hca("rail1", behind_switch(1, 1), 0)
    tree.hca("storage", behind_switch(2, 1), 1)
    choice = choice_of(tree)
    assert chosen(choice) == {"GPU0": ("rail1",), "GPU1": ("rail1",)}
    assert choice.gpus[0].reason == (
        "the only usable HCA, at NODE; shared with GPU1; as near or nearer but excluded: rail0"
    )
    assert choice.degraded == (
        "GPU0 is degraded: its rail rail0 (port 1 is DOWN, not ACTIVE) is unusable; it uses rail1 at NODE",
        "GPU1 is degraded: it shares with a GPU whose rail is unusable; it uses rail1 at PIX",
    )


@pytest.mark.parametrize(
    ("port", "rule"),
    [
        (PortSpec(gids=[]), "no-gid"),
        (PortSpec(layer="Unspecified"), "link-layer"),
        (PortSpec(state="1: DOWN"), "not-active"),
        (PortSpec(rate="10 Gb/sec (1X QDR)"), "slow"),
        (PortSpec(layer="Ethernet", rate="400 Gb/sec (4X NDR)"), "ethernet"),
    ],
)
def test_an_unfit_port_is_excluded_by_its_rule(port: PortSpec, rule: str, tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    rails(tree)
    tree.hca("odd", behind_switch(0, 2), ports=[port])
    choice = choice_of(tree)
    assert excluded(choice) == {"odd": rule}
    assert chosen(choice)["GPU0"] == ("rail0",)


def test_an_elastic_fabric_adapter_is_named(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for adapter in range(4):
        tree.hca(f"rdmap{adapter}s0", behind_switch(adapter, 1), ports=[PortSpec(layer="Unspecified")], vendor=0x1D0F)
    decision = resolve(tmp_path).decision
    assert decision.transport == "tcp"
    assert "(rdmap0s0 and 3 more: an AWS Elastic Fabric Adapter (EFA)" in decision.reason


def test_no_device_file_means_not_given_to_the_container(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu(behind_switch(0, 0))
    tree.hca("near", behind_switch(0, 1), device_file=False)
    tree.hca("far", behind_switch(1, 1))
    tree.hca("unbound", behind_switch(0, 2), uverbs=False)
    choice = choice_of(tree)
    assert chosen(choice) == {"GPU0": ("far",)}
    assert excluded(choice) == {"near": "no-uverbs", "unbound": "no-uverbs"}
    assert "/dev/infiniband/uverbs1" in reason(choice, "near")
    assert "load the ib_uverbs module" in reason(choice, "unbound")


def test_roce_beside_infiniband_loses_even_at_pix(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu(behind_switch(0, 0), 0)
    tree.gpu(behind_switch(1, 0), 0)
    tree.hca("roce0", behind_switch(0, 1), 0, ports=[ROCE])
    tree.hca("roce1", behind_switch(1, 1), 0, ports=[ROCE])
    tree.hca("ib0", behind_switch(2, 1), 1, ports=[INFINIBAND])
    tree.hca("ib1", behind_switch(3, 1), 1, ports=[INFINIBAND])
    choice = choice_of(tree)
    assert chosen(choice) == {"GPU0": ("ib0",), "GPU1": ("ib1",)}
    assert excluded(choice) == {"roce0": "ethernet", "roce1": "ethernet"}


def test_one_slow_infiniband_hca_does_not_beat_ethernet_rails(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    rails(tree, port=ROCE)
    tree.hca("storage", behind_switch(0, 2), ports=[PortSpec(rate="40 Gb/sec (4X QDR)")])
    choice = choice_of(tree)
    assert excluded(choice) == {"storage": "slow"}
    assert chosen(choice) == {f"GPU{i}": (f"rail{i}",) for i in range(4)}


def test_one_fast_hca_does_not_make_the_rails_slow(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    rails(tree, count=8, port=PortSpec(rate="100 Gb/sec (4X EDR)"))
    tree.hca("fast", behind_switch(0, 2), ports=[INFINIBAND])
    assert chosen(choice_of(tree))["GPU1"] == ("rail1",)


def test_the_faster_of_two_equally_near_hcas_wins(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu(behind_switch(0, 0))
    tree.hca("half", behind_switch(0, 1), ports=[PortSpec(rate="200 Gb/sec")])
    tree.hca("full", behind_switch(0, 2), ports=[PortSpec(rate="400 Gb/sec")])
    choice = choice_of(tree)
    assert chosen(choice) == {"GPU0": ("full",)}
    assert choice.gpus[0].fallback == ("half",)


def test_a_management_bond_on_the_gpus_switch_loses(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    rails(tree, port=ROCE)
    tree.hca("mlx5_bond_0", behind_switch(0, 2), ports=[ROCE], bond="bond0")
    assert chosen(choice_of(tree))["GPU0"] == ("rail0", "mlx5_bond_0")  # nothing tells it from a rail yet
    tree.default_route("bond0")
    choice = choice_of(tree)
    assert excluded(choice) == {"mlx5_bond_0": "default-route"}
    assert chosen(choice)["GPU0"] == ("rail0",)


def test_the_only_nic_carries_the_default_route_and_is_used(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu(behind_switch(0, 0))
    tree.hca("mlx5_0", behind_switch(0, 1), ports=[ROCE])
    tree.default_route("net1")
    assert read_fabric(tmp_path).hcas[0].default_route
    assert chosen(choice_of(tree)) == {"GPU0": ("mlx5_0",)}


def test_a_bond_with_one_dead_link_is_used_and_warned_about(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu(behind_switch(0, 0))
    tree.hca("mlx5_bond_0", behind_switch(0, 1), ports=[ROCE], bond="bond0", up=(True, False))
    choice = choice_of(tree)
    assert chosen(choice) == {"GPU0": ("mlx5_bond_0",)}
    assert choice.warnings == ("mlx5_bond_0 is a bond of 2 links and net1p1 is down",)


def test_a_virtual_function_is_used_where_its_physical_function_is_not_given(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu(behind_switch(0, 0))
    card = tree.hca("pf", behind_switch(0, 1), device_file=False)
    tree.hca("vf", behind_switch(0, 1, 2), physfn=card)
    choice = choice_of(tree)
    assert chosen(choice) == {"GPU0": ("vf",)}
    assert excluded(choice) == {"pf": "no-uverbs"}


def test_supernics_on_gpu_switches_stay_and_a_dpu_beside_them_goes(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for switch in range(2):
        tree.gpu(behind_switch(switch, 0))
        tree.hca(f"super{switch}", behind_switch(switch, 1), device_id=0xA2DC, ports=[ROCE])
    tree.hca("connectx", behind_switch(1, 2), ports=[ROCE])
    tree.hca("dpu", behind_switch(2, 1), device_id=0xA2DC, ports=[ROCE])
    choice = choice_of(tree)
    assert excluded(choice) == {"dpu": "dpu"}
    assert chosen(choice)["GPU0"] == ("super0",)


def test_the_second_port_is_used_where_the_first_is_dead(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu(behind_switch(0, 0))
    tree.hca("mlx4_0", behind_switch(0, 1), ports=[PortSpec("1: DOWN"), PortSpec()])
    resolution = resolve(tmp_path)
    assert resolution.decision.settings is not None
    assert resolution.decision.settings.environment["MC_IB_PORT"] == "2"


def test_containers_with_one_gpu_each_share_the_machines_hcas_evenly(tmp_path: Path) -> None:
    """Every container sees every GPU in sysfs and every HCA, but was given one GPU."""
    used = []
    for container in range(4):
        tree = Tree(tmp_path / str(container))
        for gpu in range(4):
            tree.gpu(on_root_port(0, gpu + 1), minor=gpu)
            tree.hca(f"mlx5_{gpu}", on_root_port(0, gpu + 9))
        tree.put(f"dev/nvidia{container}", "")
        (c,) = choice_of(tree).gpus
        assert c.gpu.ordinal == container
        used += c.hcas
    assert sorted(used) == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]


def test_a_container_given_two_gpus_and_two_hcas_spreads_only_its_own(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for gpu in range(8):
        tree.gpu(on_root_port(0, gpu + 1), minor=gpu)
        tree.hca(f"mlx5_{gpu}", on_root_port(0, gpu + 9), device_file=gpu in (0, 1))
    for gpu in (2, 4):  # over all eight GPUs, these two would meet on one HCA
        tree.put(f"dev/nvidia{gpu}", "")
    assert chosen(choice_of(tree)) == {"GPU2": ("mlx5_0",), "GPU4": ("mlx5_1",)}


def test_the_process_uses_the_hcas_of_its_visible_gpus_in_cuda_order(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    rails(tree)
    settings = resolve(tmp_path, {"CUDA_VISIBLE_DEVICES": "3,1"}).decision.settings
    assert settings is not None
    assert settings.device_name == "rail3,rail1"
    assert settings.topology["cuda:0"] == (("rail3",), ("rail0", "rail1", "rail2"))
    assert settings.topology["cuda:1"][0] == ("rail1",)


@pytest.mark.parametrize(
    ("environment", "in_container", "visible"),
    [
        ({}, [0, 1, 2, 3], [0, 1, 2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [0, 1, 2, 3], [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": ""}, [0, 1, 2, 3], []),
        ({"CUDA_VISIBLE_DEVICES": "1,7,2"}, [0, 1, 2, 3], [1]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-00000003"}, [0, 1, 2, 3], [3]),
        ({"NVIDIA_VISIBLE_DEVICES": "1,2", "CUDA_VISIBLE_DEVICES": "1"}, [1, 2], [2]),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-00000002-0000"}, [2], [2]),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, [0, 1, 2, 3], [0, 1, 2, 3]),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, [], []),
        ({"CUDA_VISIBLE_DEVICES": "MIG-5f3a"}, [0, 1, 2, 3], [0, 1, 2, 3]),
    ],
)
def test_gpus_of_container_and_process(
    environment: dict[str, str], in_container: list[int], visible: list[int], tmp_path: Path
) -> None:
    tree = Tree(tmp_path)
    rails(tree)
    fabric = read_fabric(tmp_path, environment)
    assert [gpu.ordinal for gpu in fabric.gpus if gpu.in_container] == in_container
    seen = sorted((gpu for gpu in fabric.gpus if gpu.index is not None), key=lambda gpu: gpu.index or 0)
    assert [gpu.ordinal for gpu in seen] == visible


def test_device_files_outrank_the_runtimes_variable(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    rails(tree)
    tree.put("dev/nvidia2", "")
    fabric = read_fabric(tmp_path, {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": "0"})
    assert [(gpu.ordinal, gpu.index) for gpu in fabric.gpus if gpu.in_container] == [(2, 0)]


def test_without_gpus_a_process_uses_an_hca_of_each_numa_node_and_a_storage_unit_all(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    rails(tree, count=2)
    tree.gpu(behind_switch(4, 0), 1, minor=4)
    tree.hca("far", behind_switch(4, 1), 1, ports=[INFINIBAND])
    tree.hca("down", behind_switch(5, 1), ports=[PortSpec("1: DOWN")])
    settings = resolve(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}).decision.settings
    assert settings is not None
    assert settings.device_name == "rail0,far"
    unit = resolve(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}, serves=True).decision.settings
    assert unit is not None
    assert unit.device_name == "rail0,rail1,far"
    assert not [location for location in settings.topology if location.startswith("cuda")]


def test_hidden_pci_paths_make_the_distance_unknown_and_the_spread_even(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for gpu in range(2):
        tree.gpu(behind_switch(gpu, 0))
    for number in range(2):
        tree.hca(f"rxe{number}", None)
    choice = choice_of(tree)
    assert chosen(choice) == {"GPU0": ("rxe0",), "GPU1": ("rxe1",)}
    assert choice.gpus[0].reason == "distance unknown, spread evenly over 2 equal HCAs"
    assert "PCI paths are hidden" in choice.warnings[0]


def test_an_hca_at_a_known_distance_beats_one_with_a_hidden_path(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu(behind_switch(0, 0), 0)
    tree.hca("hidden", None)
    tree.hca("far", behind_switch(1, 0), 1)
    choice = choice_of(tree)
    assert chosen(choice) == {"GPU0": ("far",)}
    assert choice.gpus[0].fallback == ("hidden",)


def test_own_domains_are_spread_by_numa_node_where_it_is_told(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for number, numa in enumerate((1, 1, 0, 0)):
        tree.gpu((f"pci{number + 1:04x}:00", f"{number + 1:04x}:00:00.0"), numa)
    for number, numa in enumerate((0, 0, 1, 1)):
        tree.hca(f"ib{number}", (f"pci{number + 257:04x}:00", f"{number + 257:04x}:00:00.0"), numa)
    choice = choice_of(tree)
    assert chosen(choice) == {"GPU0": ("ib2",), "GPU1": ("ib3",), "GPU2": ("ib0",), "GPU3": ("ib1",)}
    assert {c.distance for c in choice.gpus} == {None}
    assert "a PCI domain of its own" in choice.warnings[0]


def test_no_hca_at_all_gives_an_empty_fabric_and_no_error(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu(behind_switch(0, 0))
    choice = choice_of(tree)
    assert choice.usable == ()
    assert choice.gpus[0].reason == "no usable HCA"
    assert read_fabric(tmp_path / "nothing") == Fabric()


def test_the_users_list_overrides_guesses_but_not_facts(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    rails(tree)
    tree.hca("eth0", behind_switch(0, 2), ports=[ROCE])
    tree.hca("eth1", behind_switch(0, 3), ports=[PortSpec("1: DOWN", "Ethernet")])
    choice = choice_of(tree, include=("eth*",))
    assert [hca.name for hca in choice.usable] == ["eth0"]
    assert excluded(choice) == {**{f"rail{i}": "not-included" for i in range(4)}, "eth1": "not-active"}
    choice = choice_of(tree, exclude=("rail0",))
    assert chosen(choice)["GPU0"] in {("rail1",), ("rail2",), ("rail3",)}
    assert excluded(choice)["rail0"] == "excluded"


def test_unused_gids_are_skipped_and_their_unreadable_types_do_no_harm(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.hca("mlx5_0", behind_switch(0, 0), ports=[ROCE])
    (port,) = read_fabric(tmp_path).hcas[0].ports
    assert [(gid.index, gid.kind, gid.ipv4) for gid in port.gids] == [
        (0, "IB/RoCE v1", False),
        (1, "RoCE v2", False),
        (2, "IB/RoCE v1", True),
        (3, "RoCE v2", True),
    ]
    assert port.rate == 400.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not XML"),
        ("<system version='1'/>", "names no PCI device"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><system/>", "declarations"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_topology_file_is_refused_by_name(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "topology.xml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_topology(path)
    assert str(path) in str(caught.value)
    note = resolve(tmp_path, {"NCCL_TOPO_FILE": str(path)}).fabric.notes[0]
    assert note.startswith("NCCL_TOPO_FILE is not used: ")


def test_distances_in_a_topology_file(tmp_path: Path) -> None:
    path = tmp_path / "topology.xml"
    path.write_text(
        """<system version="1"><!-- two nodes -->
          <cpu numaid="0">
            <pci busid="ffff:ff:01.0">
              <pci busid="0001:00:00.0"/><pci busid="0002:00:00.0"/>
              <pci busid="ffff:ff:02.0"><pci busid="0003:00:00.0"/></pci>
            </pci>
            <pci busid="0004:00:00.0"/>
          </cpu>
          <cpu numaid="0"><pci busid="0005:00:00.0"/></cpu>
          <cpu numaid="1"><pci busid="000A:00:00.0"/></cpu>
        </system>"""
    )
    topology = read_topology(path)
    names = {}
    for other in ("0002", "0003", "0004", "0005", "000a"):
        distance = topology.distance("0001:00:00.0", f"{other}:00:00.0")
        assert distance is not None
        names[other] = distance.name
    assert names == {"0002": "PIX", "0003": "PXB", "0004": "PHB", "0005": "NODE", "000a": "SYS"}
    assert topology.distance("0001:00:00.0", "9999:00:00.0") is None


def test_traffic_is_read_from_hardware_or_software_counters(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.hca("mlx5_0", behind_switch(0, 0))
    tree.hca("rxe0", None, ports=[PortSpec(layer="Ethernet", gids=gids("Ethernet", 1))])
    tree.put("sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data", "10")
    tree.put("sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data", "5")
    tree.put("sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts", "7")
    tree.put("sys/class/infiniband/rxe0/ports/1/hw_counters/rcvd_pkts", "2")
    assert read_traffic(tmp_path, ["mlx5_0", "rxe0", "none"]) == {"mlx5_0": 60, "rxe0": 9}
