"""How the outcomes of a client's tests are compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.compat.suites import __main__ as suites
from tests.compat.suites.__main__ import read_report, run
from tests.compat.suites.clients import CLIENTS, Client
from tests.compat.suites.table import compare


def report(*cases: tuple[str, str]) -> str:
    body = "".join(f'<testcase classname="t" name="{name}">{child}</testcase>' for name, child in cases)
    return f"<testsuites><testsuite>{body}</testsuite></testsuites>"


def test_only_what_passes_with_the_release_alone_and_has_no_reason_is_a_difference() -> None:
    theirs = read_report(report(("a", ""), ("b", ""), ("c", ""), ("d", "<failure/>"), ("e", "<skipped/>")))
    ours = read_report(report(("a", ""), ("b", "<failure/>"), ("c", "<error/>"), ("d", ""), ("e", "<skipped/>")))
    text, differing = compare(theirs, ours, reasons={"t::c": "no such thing here"})
    assert differing == ["t::b"]
    assert text.splitlines() == [
        "passes with 0.1.x: 3 of 5",
        "passes here:       2 of 5",
        "  passed -> failed  t::b",
        "  passed -> error  t::c  (no such thing here)",
        "  failed -> passed  t::d",
        "differences without a reason: 1",
    ]


def test_a_file_that_kills_its_process_costs_its_own_outcomes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "tests/test_a.py": "import os\n\ndef test_it():\n    os._exit(0)\n",
        "tests/test_b.py": "import here\n\ndef test_it():\n    assert here.answer == 42\n",
        "good.py": "import sys, here\nassert sys.argv[1:] == ['--steps', '1']\n",
        "bad.py": "raise SystemExit(3)\n",
        "library/here.py": "answer = 42\n",
        "drivers/loop.py": "import here, os\nassert os.environ['LAYOUT'] == 'dense'\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(suites, "DRIVERS", tmp_path / "drivers")
    client = Client(
        copied=("tests", "good.py", "bad.py"),
        tests=("tests/test_b.py", "tests"),
        scripts=("good.py --steps 1", "bad.py"),
        loops=("loop.py",),
        environ={"LAYOUT": "dense"},
    )
    found = run(client, tmp_path, tmp_path / "library", sys.executable, 120.0)
    assert found == {
        "tests.test_b::test_it": "passed",
        "tests/test_a.py": "failed",
        "good.py": "passed",
        "bad.py": "failed",
        "loop.py": "passed",
    }
    for only in ("good.py", "loop.py"):
        assert list(run(client.only([only]), tmp_path, tmp_path / "library", sys.executable, 120.0)) == [only]


def test_every_loop_is_there() -> None:
    loops = {loop.split()[0] for client in CLIENTS.values() for loop in client.loops}
    assert sorted(loops) == sorted(path.name for path in suites.DRIVERS.glob("*.py"))


def test_without_ray_nothing_is_started_in_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import ray\n\n\ndef test_it():\n    ray.init(num_cpus=8)\n    assert not ray.is_initialized()\n"
    )
    lines = (
        "import ray, sys",
        "@ray.remote",
        "class Actor:",
        "    async def double(self, number):",
        "        return 2 * number",
        "ray.init()",
        "assert ray.get([Actor.options(num_cpus=1).remote().double.remote(4)]) == [8]",
        "assert sys.argv[1:] == ['--steps']",
    )
    (tmp_path / "script.py").write_text("\n".join(lines))
    client = Client(copied=(".",), tests=("test_a.py",), scripts=("script.py --steps",))
    found = run(client, tmp_path, tmp_path, sys.executable, 120.0, without_ray=True)
    assert found == {"test_a::test_it": "passed", "script.py": "passed"}
