"""Which tests of a client touch the queue, the loops of ours around its classes, and why an outcome differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

__all__ = ["CLIENTS", "Client"]


@dataclass(frozen=True)
class Client:
    """``copied``: folders and files that the tests need beside them. ``tests``: paths in the checkout, for pytest; a
    snapshot may lack some of them. ``scripts``: programs with their arguments; one that ends with status 0 passes.
    ``loops``: programs in the folder ``drivers`` beside this file, with their arguments. ``importable``: the checkout
    itself is on the import path. ``release``: of TransferQueue, that the client is written for. ``environ``: variables
    of all runs. ``clustered``: ``module:name`` of what does nothing in runs without Ray. ``reasons``: beginning of a
    test's id -> why its outcome differs."""

    copied: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
    loops: tuple[str, ...] = ()
    importable: bool = True
    release: str = "0.1.11"
    environ: dict[str, str] = field(default_factory=dict)
    clustered: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)

    def only(self, paths: Sequence[str]) -> Client:
        """This client with the tests and scripts under ``paths``, all of them if there are none."""
        if not paths:
            return self
        scripts, loops = (
            tuple(name for name in names if name.startswith(tuple(paths))) for names in (self.scripts, self.loops)
        )
        tests = tuple(path for path in paths if not any(name.startswith(path) for name in (*scripts, *loops)))
        return replace(self, tests=tests, scripts=scripts, loops=loops)


_PRIVATE = "looks at a private attribute of the sampler"
_SEQLEN = {
    "tests.test_samplers.TestSeqlenBalancedSampler::test_states_cache_populated_for_all_ranks": _PRIVATE,
    "tests.test_samplers.TestSeqlenBalancedSampler::test_clear_cache": _PRIVATE,
}
_FILES = "looks at files of a checkpoint, which have names of their own here"
_GLOBAL = "sets a private variable of the module"
_CHECKPOINT = "tests.e2e.test_checkpoint_e2e.Test"

CLIENTS = {
    "upstream": Client(
        copied=("tests", "tutorial", "recipe"),
        tests=(
            "tests/test_samplers.py",
            "tests/test_metadata.py",
            "tests/test_serial_utils_batch_on_cpu.py",
            "tests/test_tensor_utils.py",
            "tests/test_streaming_dataset.py",
            "tests/e2e",
        ),
        scripts=(
            "tutorial/01_core_components.py",
            "tutorial/02_kv_interface.py",
            "tutorial/03_metadata_concepts.py",
            "tutorial/04_understanding_controller.py",
            "tutorial/05_custom_sampler.py",
            "tutorial/06_streaming_dataloader.py",
            "recipe/simple_use_case/single_controller_demo.py --num-samples 8 --global-batch-size 4"
            " --rollout-agent-num-workers 1",
            "recipe/simple_use_case/relax_demo.py --num-steps 1 --global-batch-size 1 --micro-batch-size 1"
            " --num-rollout-workers 1 --num-ref-workers 1 --num-actor-workers 1 --num-reward-workers 1"
            " --rollout-sleep-seconds 0.01 --stage-sleep-seconds 0.01 --weight-sync-seconds 0.01",
        ),  # with the arguments of its own CI
        importable=False,
        reasons={
            **_SEQLEN,
            f"{_CHECKPOINT}CheckpointRoundtrip::test_tensor_fields": _FILES,
            f"{_CHECKPOINT}IncludeStorageFalse::test_storage_saved_is_true": _FILES,
            f"{_CHECKPOINT}CheckpointErrors::test_load_raises_on_storage_unit_count_mismatch": _FILES,
            f"{_CHECKPOINT}CheckpointErrors::test_save_raises_if_not_initialized": _GLOBAL,
            f"{_CHECKPOINT}CheckpointErrors::test_load_raises_if_not_initialized": _GLOBAL,
            f"{_CHECKPOINT}CheckpointErrors::test_no_partial_state_on_failed_save": (
                "replaces a method that the save does not call here; tests/integration/test_checkpoint.py kills a save"
            ),
            "tests.e2e.test_ssd_offload_e2e": "counts a file for each value; here blocks move when memory is full",
        },
    ),
    "verl": Client(
        copied=("tests",),
        tests=(
            "tests/trainer/ppo/v1/test_reissue_inflight_on_cpu.py",
            "tests/trainer/ppo/v1",
            "tests/test_protocol_on_cpu.py",
            "tests/utils/test_transferqueue_utils_on_cpu.py",
            "tests/utils/test_rl_insight_logger_on_cpu.py",
        ),
        loops=("verl_loop.py",),
    ),
    "nemo-rl": Client(
        copied=("tests", "examples", "pyproject.toml"),
        tests=("tests/unit/data_plane",),
        loops=("nemo_loop.py simple", "nemo_loop.py mooncake_cpu"),
        clustered=(
            "nemo_rl.distributed.virtual_cluster:init_ray",
            "nemo_rl.utils.logger:RayGpuMonitorLogger.start",
            "nemo_rl.utils.logger:RayGpuMonitorLogger.stop",
        ),
    ),
    "relax": Client(
        copied=("tests",),
        tests=("tests/utils/test_tq_dataplane_behavior.py",),
    ),
    "relax-fork": Client(  # give its checkout as --release too: it is not on PyPI
        copied=("tests",),
        tests=("tests/test_samplers.py", "tests/test_metadata.py"),
        importable=False,
        reasons={
            **_SEQLEN,
            **{
                f"tests.test_samplers.TestStreamingTokenBudgetSampler::{test}": _PRIVATE
                for test in (
                    "test_initialization_defaults",
                    "test_eos_drains_all_across_rounds_within_budget",
                    "test_tail_flush_assigns_all_to_buckets",
                    "test_bucketed_samples_not_reassigned",
                    "test_clear_cache",
                )
            },
            "tests.test_samplers.TestStreamingTokenBudgetSampler::test_eos_waits_for_downstream_fields": (
                "fills the inside of the old controller by hand"
            ),
        },
    ),
    "roll": Client(loops=("roll_loop.py",), release="0.1.6", environ={"TQ_LAYOUT": "dense"}),
    "unirl": Client(loops=("unirl_loop.py",), release="0.1.5", clustered=("transfer_queue:get_placement_group",)),
}
