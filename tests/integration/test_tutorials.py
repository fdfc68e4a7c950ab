"""The tutorials and recipes run, print what they say they print, and their pages are in step with them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import preloaded
from tests.integration.stack import ROOT

FOLDER = ROOT / "examples" / "tutorials"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.name[0].isdigit() or path.name.startswith("recipe_"))


def run(script: Path) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("TQ_CONFIG_FILE", "TQ_CONTROLLER_ADDRESS"):
        environ.pop(name, None)
    done = preloaded.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_runs_and_prints_what_its_comments_say(script: Path) -> None:
    printed = run(script)
    for said in re.findall(r"^ *print\(.*\)  # (.*)$", script.read_text(), re.MULTILINE):
        for expected in said.removeprefix("... ").split(" | "):  # a loop prints several
            assert expected.split("  (")[0] in printed, f"{expected!r} is not in\n{printed}"


@pytest.mark.timeout(300)
def test_the_example_of_the_readme_is_a_file_that_runs() -> None:
    script = ROOT / "examples" / "grpo.py"
    body = script.read_text().split('"""\n\n', 1)[1]
    assert f"```python\n{body}```" in (ROOT / "README.md").read_text()
    assert "step 2: 32 rows" in run(script)


def test_the_pages_are_in_step_with_the_scripts() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "tutorials"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
