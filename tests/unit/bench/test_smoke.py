"""What the smoke run of the benchmark judges, and how; and what ``make test`` makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import smoke
from bench.environment import PeersNotInstalled, install
from bench.workloads import SMOKE, workload

ROOT = Path(__file__).parents[3]
RECORDED: dict[str, float] = json.loads(smoke.RECORD.read_text())


def judged() -> set[str]:
    """Metrics that the smoke run compares."""
    return {f"{name}.{row.metric}" for name in SMOKE for row in workload(name).rows if row.judged}


def results(names: list[str], ratio: dict[str, float], failed: str = "") -> dict[str, Any]:
    """As of a run in which ours is as many times better as ``ratio`` says; without the workload that ``failed``."""
    workloads = {}
    for name in names:
        ours: dict[str, list[float]] = {}
        theirs: dict[str, list[float]] = {}
        for row in workload(name).rows:
            better = ratio.get(f"{name}.{row.metric}", 1.0)
            ours[row.metric] = [better if row.better == "higher" else 1 / better]
            theirs[row.metric] = [1.0]
        samples = {"ours": ours} if name == failed else {"ours": ours, "upstream": theirs}
        workloads[name] = {"samples": samples, "failed": {"upstream": "it ended"} if name == failed else {}}
    return {"workloads": workloads}


def test_the_record_is_of_medians_and_has_all_of_them() -> None:
    assert set(RECORDED) == judged()
    assert not [metric for metric in RECORDED if "p99" in metric]


def test_ratios_just_above_half_of_the_record_pass_at_the_first_try() -> None:
    tries: list[list[str]] = []

    def run(names: list[str]) -> dict[str, Any]:
        tries.append(names)
        return results(names, {metric: 0.51 * before for metric, before in RECORDED.items()})

    assert smoke.check(run) == 0
    assert tries == [list(SMOKE)]


def test_a_ratio_below_half_is_measured_again_alone_and_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    tries: list[list[str]] = []

    def run(names: list[str]) -> dict[str, Any]:
        tries.append(names)
        return results(names, RECORDED | {"control.fetch_1": 0.49 * RECORDED["control.fetch_1"]})

    assert smoke.check(run) == 1
    assert tries == [list(SMOKE), ["control"], ["control"]]
    assert "short of what was recorded: control" in capsys.readouterr().out


def test_a_run_that_took_too_long_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[list[str]] = []

    def run(names: list[str]) -> dict[str, Any]:
        tries.append(names)
        return results(names, {})

    monkeypatch.setattr(smoke, "PATIENCE_S", -1.0)
    assert smoke.check(run) == 1
    assert tries == [list(SMOKE)]


def test_a_slow_tail_alone_passes() -> None:
    assert smoke.check(lambda names: results(names, RECORDED | {"small.put_p99": 0.001})) == 0


def test_a_peer_that_fails_each_time_fails_the_run_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.check(lambda names: results(names, RECORDED, failed="mixed")) == 1
    assert "mixed: TransferQueue 0.1 (PyPI) failed: it ended" in capsys.readouterr().out


def test_a_metric_that_nobody_measures_any_more_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "record").write_text(json.dumps(RECORDED | {"dense.gone": 1.0}))
    assert smoke.check(lambda names: results(names, RECORDED), tmp_path / "record") == 1


def test_a_run_in_which_a_peer_failed_is_not_recorded(tmp_path: Path) -> None:
    assert smoke.record(lambda names: results(names, RECORDED, failed="small"), tmp_path / "record") == 1
    assert not (tmp_path / "record").exists()
    assert smoke.record(lambda names: results(names, RECORDED), tmp_path / "record") == 0
    assert set(json.loads((tmp_path / "record").read_text())) == judged()


def test_the_lowest_of_several_measurements_is_recorded(tmp_path: Path) -> None:
    factors = iter([1.0, 0.5, 2.0])

    def run(names: list[str]) -> dict[str, Any]:
        factor = next(factors)
        return results(names, {metric: factor * before for metric, before in RECORDED.items()})

    assert smoke.record(run, tmp_path / "record") == 0
    found = json.loads((tmp_path / "record").read_text())
    assert all(found[metric] == pytest.approx(before / 2, rel=0.02) for metric, before in RECORDED.items())


# ------------------------------------------------------------------------------------------------- the peers' packages


def installer(folder: Path, failures: int) -> str:
    """A stand-in for uv whose first installations fail."""
    script = folder / "uv"
    script.write_text(
        f"#!/bin/sh\n[ $1 = venv ] && {{ mkdir -p {folder}/made; exit 0; }}\n"
        f"echo x >>{folder}/calls; [ $(wc -l <{folder}/calls) -gt {failures} ]\n"
    )
    script.chmod(0o755)
    return str(script)


def test_a_download_that_fails_is_tried_again(tmp_path: Path) -> None:
    install(installer(tmp_path, 2), tmp_path / "made", pauses_s=(0.0, 0.0))
    assert (tmp_path / "made" / ".ready").exists()


def test_downloads_that_keep_failing_end_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://mirror.example/simple")
    with pytest.raises(PeersNotInstalled, match=r"3 attempts.*mirror\.example.*TQ_BENCH_PEERS_PYTHON"):
        install(installer(tmp_path, 99), tmp_path / "made", pauses_s=(0.0, 0.0))
    assert len((tmp_path / "calls").read_text().split()) == 3
    assert not (tmp_path / "made" / ".ready").exists()


def test_the_benchmark_ends_with_that_message_and_no_traceback(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for name in ("UV_DEFAULT_INDEX", "PIP_INDEX_URL"):
        environ[name] = "http://127.0.0.1:1/simple"
    environ |= {"UV_CACHE_DIR": str(tmp_path / "uv"), "UV_HTTP_RETRIES": "0", "PIP_FIND_LINKS": ""}
    code = (
        "import sys, bench.environment as e\n"
        "e.install.__defaults__ = ((0.0,),)\n"
        "import bench.__main__ as m\n"
        "sys.exit(m.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--smoke"], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "could not be installed in 2 attempts" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


# ----------------------------------------------------------------------------------------------------------- make test


@pytest.mark.parametrize("measured", [0, 1])
@pytest.mark.parametrize("tested", [0, 1])
@pytest.mark.parametrize("ci", ["true", ""])
def test_make_test_measures_before_the_tests_in_ci_and_both_have_to_pass(
    measured: int, tested: int, ci: str, tmp_path: Path
) -> None:
    (tmp_path / ".ready").touch()
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\ncase "$*" in\n'
        f"  *bench*) exit {measured};;\n  *pytest*) echo '7 passed'; exit {tested};;\nesac\n"
    )
    python.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--silent", "test", f"CI={ci}", "MAKE=true", f"VENV={tmp_path}", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    measuring = [position for position, call in enumerate(calls) if call == "-m bench --smoke"]
    testing = [position for position, call in enumerate(calls) if "pytest" in call]
    assert (done.returncode == 0) == (tested == 0 and (measured == 0 or not ci))
    assert len(measuring) == (1 if ci else 0)
    assert len(testing) == 1
    assert all(position < testing[0] for position in measuring)
    assert done.stdout.splitlines()[-1] == "7 passed"
    assert ("bench-smoke failed" in done.stderr) == (bool(ci) and measured == 1 and tested == 0)
