"""Which features work together: ``python -m tests.features [--check] FILE`` writes the table into the page.

Each cell names the test that shows that it works, or gives the reason why it cannot. Where the product has a setting
to refuse, ``tests/unit/docs/test_features.py`` makes it refuse with that reason.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["COLUMNS", "TABLE", "Cannot", "Refused", "Works", "main", "page"]

BACKENDS = ("simple", "mooncake", "ray", "yuanrong", "a package")
COLUMNS = (*BACKENDS, "several controllers")


@dataclass(frozen=True)
class Works:
    """``test``: path and name below ``tests``."""

    test: str


@dataclass(frozen=True)
class Refused:
    """``asked`` is refused with ``message``: the spec of a resource, or what ``init``, ``tq up`` or the controller is
    given (``where``)."""

    reason: str
    asked: str
    message: str
    where: str = "resource"


@dataclass(frozen=True)
class Cannot:
    """Nothing there could ask for it, or what is asked for has no effect beyond the reason."""

    reason: str


Cell = Works | Refused | Cannot | None
"""None: not tested."""

_CONFORMS = Works("integration/storage/test_conformance.py::test_backend_conforms")
_TENANTS = "clients move rows past the storage units, which could not keep tenants apart"
_OWN_MEMORY = "a unit's blocks end with its process or its actor; the controller's journal alone outlives them"
_NAMES_NONE = "a resource names built-in backends only: the images lack the package"
_UNIT_IS_ACTOR = "its storage units are actors of a Ray cluster"
_WORKER_FIRST = "its worker must run already: start the queue with `tq up`"
_OBJECT_STORE = "integration/test_checkpoint_object_store.py"
_SCHEDULED = "test_a_queue_of_tq_up_is_saved_on_schedule_and_starts_in_another_shape_and_backend"
_IN_KUBERAY = Works("unit/operator/test_injection.py::test_a_pod_of_kuberay_gets_what_a_pod_of_a_deployment_gets")
_ANY_NUMBER = "integration/test_shards.py::test_a_checkpoint_goes_from_any_number_of_controllers_to_any_other"


def _policy(backend: str) -> Refused:
    policy = "security: {policy: [{name: a, namespace: n, roles: [consumer]}]}"
    return Refused(_TENANTS, f"{{backend: {{{backend}: {{}}}}, {policy}}}", "security.policy needs backend simple")


def _spill(backend: str, reason: str) -> Refused:
    return Refused(reason, f"{{backend: {{{backend}: {{ssdOffload: {{path: /x}}}}}}}}", f"{backend}.ssdOffload")


_PACKAGE = Refused(_NAMES_NONE, "{backend: {redis: {}}}", "spec.backend")
_YUANRONG_UP = Works("integration/storage/test_yuanrong.py::test_tq_up_encrypts_saves_and_restores_a_queue_on_a_worker")
_PACKAGE_KILLED = Works(
    "integration/storage/test_packaged.py"
    "::test_rows_outlive_a_killed_controller_and_killed_units_and_connections_of_the_queue_have_tls"
)

TABLE: dict[str, tuple[Cell, ...]] = {
    "several controllers": (_CONFORMS,) * 6,
    "checkpoints": (*[_CONFORMS] * 5, Works(_ANY_NUMBER)),
    "saves on a schedule, `restoreFrom`": (
        Works(f"{_OBJECT_STORE}::{_SCHEDULED}"),
        Works(f"{_OBJECT_STORE}::{_SCHEDULED}"),
        Refused(
            f"{_UNIT_IS_ACTOR}, whose processes alone read its rows: call `save_checkpoint` there",
            "{backend: {ray: {}}, restoreFrom: /x}",
            "checkpoint and restoreFrom need another backend than ray",
        ),
        _YUANRONG_UP,
        _PACKAGE,
        Works(f"{_OBJECT_STORE}::{_SCHEDULED}"),
    ),
    "policy and tenants": (
        Works("integration/security/test_access.py::test_tenants_use_their_own_partitions_and_see_only_those"),
        _policy("mooncake"),
        _policy("ray"),
        _policy("yuanrong"),
        Refused(_TENANTS, "redis", "which could not keep tenants apart", "controller"),
        Works("integration/security/test_access.py::test_tenants_of_several_controllers_are_kept_apart"),
    ),
    "TLS": (
        Works("integration/security/test_tls.py::test_rows_go_through_tls_between_client_controller_and_unit"),
        Works("integration/test_tq_up.py::test_a_shard_that_ends_is_started_again_while_the_others_go_on"),
        Refused(
            "its storage units are actors of the job; encrypt the network of the Ray cluster",
            "{backend: {ray: {}}, security: {tls: {mode: operator}}}",
            "backend ray has no TLS",
        ),
        _YUANRONG_UP,
        _PACKAGE_KILLED,
        Works("integration/test_tq_up.py::test_a_shard_that_ends_is_started_again_while_the_others_go_on"),
    ),
    "durability process": (
        Works("integration/test_durable_queue.py::test_rows_of_the_last_run_are_there_in_the_next"),
        Cannot(_OWN_MEMORY),
        Cannot(_OWN_MEMORY),
        Cannot(_OWN_MEMORY),
        _PACKAGE_KILLED,
        Works("integration/test_shards.py::test_rows_of_all_shards_outlive_their_controllers_and_the_queue"),
    ),
    "durability node": (
        Works("chaos/test_units_killed.py::test_units_killed_under_load_lose_and_double_nothing"),
        Cannot(_OWN_MEMORY),
        Cannot(_OWN_MEMORY),
        Cannot(_OWN_MEMORY),
        Cannot("it is the package's own matter"),
        Works(
            "cluster/test_e2e_shards.py::test_a_killed_shard_costs_its_own_partitions_only_and_comes_back_with_their_rows"
        ),
    ),
    "spill to a disk": (
        Works("integration/storage/test_spill.py::test_twice_the_memory_comes_back_equal_and_the_disk_is_given_back"),
        Refused(
            "the engine does not tell which unit has a block that it moved to disk",
            "MooncakeStore",
            "the engine does not tell which unit has a block",
            "init",
        ),
        _spill("ray", "Ray's object store spills by itself"),
        _spill("yuanrong", "the data system's worker decides what it keeps in memory"),
        Cannot("it is the package's own matter"),
        Works("integration/storage/test_spill.py::test_twice_the_memory_comes_back_equal_and_the_disk_is_given_back"),
    ),
    "a unit is drained": (
        Works("integration/test_draining.py::test_a_unit_is_drained_under_load_and_nobody_misses_a_row"),
        *[_CONFORMS] * 4,
        Works("integration/test_shards.py::test_a_unit_is_emptied_of_the_blocks_of_all_shards"),
    ),
    "pods that drain by themselves": (
        Works(
            "cluster/test_e2e.py::test_the_storage_grows_shrinks_rolls_and_leaves_a_node_under_load_without_losing_a_row"
        ),
        Works(
            "integration/mooncake/test_draining.py::test_the_hook_of_a_pod_moves_a_block_larger_than_the_memory_that_it_takes"
        ),
        Cannot(_UNIT_IS_ACTOR),
        Cannot("not built: use `tq drain`"),
        Cannot(_NAMES_NONE),
        Works("integration/test_shards.py::test_the_hook_of_a_pod_empties_its_unit_of_the_blocks_of_all_shards"),
    ),
    "a partition moves (`durability: process` or `node`)": (
        Works("integration/test_moves.py::test_a_partition_moves_with_everything_that_is_known_of_it"),
        *[_CONFORMS] * 4,
        Works("integration/test_moves.py::test_no_row_is_lost_or_doubled_while_movers_and_controllers_are_killed"),
    ),
    "views (`zero_copy`)": (
        _CONFORMS,
        _CONFORMS,
        Cannot("`zero_copy=True` is accepted and returns a copy"),
        *[_CONFORMS] * 3,
    ),
    "leases": (_CONFORMS,) * 6,
    "loaders with processes (spawn)": (_CONFORMS,) * 6,
    "`init()` on one machine": (
        Works("integration/test_shards.py::test_a_program_starts_several_controllers_and_hears_when_one_ends"),
        Works("compat/test_settings.py::test_init_starts_a_mooncake_store_of_its_own_and_uses_one_that_is_there"),
        Refused("it needs Ray", "RayStore", "call ray.init() before transfer_queue.init()", "init"),
        Refused(
            _WORKER_FIRST,
            "Yuanrong",
            "cannot be started by init()",
            "init",
        ),
        Works("integration/storage/test_packaged.py::test_a_program_names_the_backend_of_an_installed_package"),
        Works("integration/test_shards.py::test_a_program_starts_several_controllers_and_hears_when_one_ends"),
    ),
    "`init()` in a Ray cluster": (
        Works("integration/ray/test_launch.py::test_driver_actors_and_tasks_use_one_queue"),
        Works("integration/ray/test_storage.py::test_a_mooncake_queue_brings_its_master_which_ends_with_it"),
        Works("integration/ray/test_storage.py::test_values_come_back_whole_and_in_part"),
        Refused(
            _WORKER_FIRST,
            "Yuanrong",
            "cannot be started by init()",
            "init",
        ),
        Works("integration/storage/test_packaged.py::test_a_program_in_a_ray_cluster_names_it_and_tasks_read_its_rows"),
        Works("integration/ray/test_storage.py::test_several_controllers_share_the_units_and_end_together"),
    ),
    "pods of KubeRay": (
        Works(
            "cluster/test_e2e_kuberay.py::test_actors_of_a_ray_job_on_both_nodes_put_and_get_through_the_queue_of_their_label"
        ),
        _IN_KUBERAY,
        Cannot(f"{_UNIT_IS_ACTOR}: the operator runs their controller alone"),
        None,
        _PACKAGE,
        _IN_KUBERAY,
    ),
    "RDMA": (
        Cannot("blocks go through shared memory and TCP"),
        Works("rdma/test_rdma.py::test_bytes_are_equal_and_go_over_the_devices_alone"),
        Cannot("Ray moves objects over TCP"),
        Cannot("the policy chooses devices for Mooncake's engine only"),
        Cannot("it is the package's own matter"),
        None,
    ),
    "`tq up`": (
        Works("integration/test_tq_up.py::test_a_command_uses_the_queue_and_gives_its_exit_code"),
        Works("integration/test_tq_up.py::test_a_command_uses_the_queue_and_gives_its_exit_code"),
        Refused(_UNIT_IS_ACTOR, "{backend: {ray: {}}}", "its storage units are actors of a Ray cluster", "tq up"),
        _YUANRONG_UP,
        _PACKAGE,
        Works("integration/test_tq_up.py::test_a_shard_that_ends_is_started_again_while_the_others_go_on"),
    ),
    "the operator": (
        Works("cluster/test_e2e.py::test_rollout_data_reaches_a_trainer_on_the_other_node_byte_for_byte"),
        Works("cluster/test_e2e.py::test_the_commands_of_the_quick_start_lead_to_a_pod_that_puts_and_gets"),
        Cannot(f"{_UNIT_IS_ACTOR}: the operator runs their controller alone"),
        Works("unit/operator/test_plan.py::test_the_children_are_as_recorded"),
        _PACKAGE,
        Works(
            "cluster/test_e2e_shards.py::test_a_killed_shard_costs_its_own_partitions_only_and_comes_back_with_their_rows"
        ),
    ),
}

_START, _END = "<!-- features: made by `make generate` from tests/features.py; do not edit. -->", "<!-- /features -->"


def page() -> str:
    """The table as Markdown, with the reasons below it."""
    reasons: dict[str, int] = {}

    def shown(cell: Cell) -> str:
        if isinstance(cell, Works):
            return "works"
        return "not tested" if cell is None else f"no ({reasons.setdefault(cell.reason, len(reasons) + 1)})"

    lines = [f"| | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    lines += [f"| {name} | {' | '.join(map(shown, row))} |" for name, row in TABLE.items()]
    numbered = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([_START, "", *lines, "", *numbered, "", _END])


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if ``--check`` finds the page out of date."""
    parser = argparse.ArgumentParser(prog="python -m tests.features", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the table differs")
    parser.add_argument("file", type=Path, help="the page, which has the marks of the table")
    options = parser.parse_args(arguments)
    file: Path = options.file
    text = file.read_text()
    before, _, rest = text.partition(_START)
    found = f"{before}{page()}{rest.partition(_END)[2]}"
    if options.check:
        if found != text:
            print(f"{file} is out of date; run: make generate", file=sys.stderr)
        return int(found != text)
    file.write_text(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
