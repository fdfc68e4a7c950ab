"""The README's demo: a real job learns through the queue, on both backends, and leaves nothing running."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.integration.queue_command import QueueCommand
from tests.integration.stack import ROOT


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["simple", "mooncake"])
def test_the_cartpole_job_learns_and_reports(backend: str, tmp_path: Path) -> None:
    queue = QueueCommand(tmp_path, {backend: {}})
    sampler = {"name": "GRPOGroupNSampler", "args": {"n_samples_per_prompt": 8}}
    queue.resource["spec"]["controller"]["sampler"] = sampler
    queue.write()
    done = queue.up(sys.executable, str(ROOT / "examples" / "cartpole" / "job.py"), timeout_s=380)
    assert done.returncode == 0, done.stdout + done.stderr
    means = [float(mean) for mean in re.findall(r"return +([\d.]+)", done.stdout)]
    assert means[0] < 100  # an untrained policy makes about 20
    assert means[-1] >= 400
    for stage in ("put episode", "get batch", "wait for groups", "wait for weights", "update"):
        assert re.search(rf"^ +{stage} +\d+", done.stdout, re.MULTILINE), done.stdout
    samples = int(re.search(r"^(\d+) samples, [\d.]+ MB through the queue", done.stdout, re.MULTILINE)[1])  # type: ignore[index]
    assert samples % 24 == 0
    assert samples > 0
    assert not re.search("came in several puts|there is no partition", done.stderr)
    assert queue.processes() == []


def test_the_quick_start_file_is_accepted_by_tq(tmp_path: Path) -> None:
    queue = QueueCommand(tmp_path, {"simple": {}})
    done = queue.run("up", "-f", str(ROOT / "examples" / "quickstart.yaml"), "--backend", "none")
    assert done.stderr == (
        'error: --backend: Unsupported value: "none": supported values: "simple", "mooncake", "yuanrong"\n'
    )
