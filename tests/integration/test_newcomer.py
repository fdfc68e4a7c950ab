"""Somebody who has never seen the project follows the README, and does nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from tests.integration.stack import ROOT

README = (ROOT / "README.md").read_text()
CLUSTER_PAGE = (ROOT / "docs" / "quickstart-cluster.md").read_text()
WORDS_A_MINUTE = 200
ANSWER = "['2 + 2 = 4', '2 + 2 = 5'] tensor([1., 0.])\n"


def section(title: str, text: str = README) -> str:
    """What stands under a heading of the second level."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"no section {title}"
    return found[1]


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def minutes(text: str) -> float:
    return len(text.split()) / WORDS_A_MINUTE


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """After the README's installation: ``tq`` and ``python`` are there, and nothing of a queue is set."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "tq"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m transfer_queue.cli "$@"\n')
    command.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
    paths = (str(tmp_path / "bin"), str(Path(sys.executable).parent), clean["PATH"])
    return {
        **clean,
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": str(ROOT),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }


def run(script: str, folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (folder / "examples").symlink_to(ROOT / "examples")
    command = ["bash", "-euc", script]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280, check=False)


def test_the_first_put_and_get_needs_five_minutes_of_reading_and_one_program(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    assert minutes(README[: README.index("## One queue, several processes")]) < 5
    (program,) = blocks("python", section("The first put and get"))
    (tmp_path / "first.py").write_text(program)
    done = run("python first.py", tmp_path, environ)
    assert (done.returncode, done.stdout) == (0, ANSWER), done.stderr
    (line,) = done.stderr.splitlines()
    assert "found no queue and started a queue of its own at 127.0.0.1:" in line


@pytest.mark.timeout(300)
def test_the_commands_of_one_queue_for_several_processes_work_as_they_stand(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    (commands,) = blocks("sh", section("One queue, several processes"))
    assert "tq status, tq down" in commands
    done = run(f"{commands}\ntq status\ntq down\n", tmp_path, environ)
    left = [process for process in psutil.process_iter(["environ"]) if _belongs(process, tmp_path)]
    for process in left:
        process.kill()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MB through the queue" in done.stdout
    assert "quickstart: mooncake backend" in done.stdout
    assert "quickstart is down" in done.stderr
    assert not left


def _belongs(process: psutil.Process, folder: Path) -> bool:
    return ((process.info["environ"] or {}).get("XDG_STATE_HOME") or "").startswith(str(folder))


def test_a_cluster_needs_ten_minutes_of_reading_and_only_files_values_and_targets_that_exist() -> None:
    upto = README[: README.index("## More")]
    assert minutes(upto) + minutes(CLUSTER_PAGE) < 10
    commands = "".join(blocks("sh", section("On Kubernetes"))) + "".join(blocks("sh", CLUSTER_PAGE))
    files = set(re.findall(r"(?<![\w/])(?:charts|examples)/[\w./-]+", commands))
    assert files
    assert {name for name in files if not (ROOT / name).exists()} == set()
    values = yaml.safe_load((ROOT / "charts" / "transferqueue" / "values.yaml").read_text())
    settings = re.findall(r"--set ([\w.]+)=", commands)
    assert settings
    for setting in settings:
        found = values
        for name in setting.split("."):
            found = found[name]
    targets = re.findall(r"\bmake (?:-s )?([a-z-]+)", commands)
    assert targets
    makefile = (ROOT / "Makefile").read_text() + (ROOT / "tests" / "cluster" / "cluster.mk").read_text()
    assert {target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)} == set()
    (queue,) = set(re.findall(r"transferqueue\.io/inject[:=] ?([\w-]+)", commands + section("On Kubernetes")))
    assert yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())["metadata"]["name"] == queue
