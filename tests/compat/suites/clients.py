"""Which tests of a client touch the queue, and where an outcome differs for a reason."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CLIENTS", "Client"]


@dataclass(frozen=True)
class Client:
    """``copied``: folders and files that the tests need beside them. ``tests``: paths in the checkout, for pytest; a
    snapshot may lack some of them. ``importable``: the checkout itself is on the import path. ``reasons``: beginning of
    a test's id -> why its outcome differs."""

    copied: tuple[str, ...]
    tests: tuple[str, ...]
    importable: bool = True
    reasons: dict[str, str] = field(default_factory=dict)


_PRIVATE = "looks at a private attribute of the sampler"

CLIENTS = {
    "upstream": Client(
        copied=("tests", "tutorial", "recipe"),
        tests=(
            "tests/test_samplers.py",
            "tests/test_metadata.py",
            "tests/test_serial_utils_batch_on_cpu.py",
            "tests/test_tensor_utils.py",
            "tests/e2e",
        ),
        importable=False,
        reasons={
            "tests.test_samplers.TestSeqlenBalancedSampler::test_states_cache_populated_for_all_ranks": _PRIVATE,
            "tests.test_samplers.TestSeqlenBalancedSampler::test_clear_cache": _PRIVATE,
        },
    ),
    "verl": Client(
        copied=("tests",),
        tests=(
            "tests/trainer/ppo/v1/test_reissue_inflight_on_cpu.py",
            "tests/trainer/ppo/v1",
            "tests/test_protocol_on_cpu.py",
            "tests/utils/test_transferqueue_utils_on_cpu.py",
        ),
    ),
    "nemo-rl": Client(
        copied=("tests", "pyproject.toml"),
        tests=("tests/unit/data_plane",),
    ),
}
