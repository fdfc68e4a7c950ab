"""The documentation against the product: every block runs or says why not, every command and error has its place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from typer import Typer
from typer.main import get_command

from tests.integration.stack import ROOT
from tq_operator.kubectl.app import app as plugin
from transfer_queue import errors
from transfer_queue.cli.app import app

DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if path.parent.name != "tutorials")
"""All pages but those made of scripts, which run in their own tests."""
_BLOCK = re.compile(
    r"(?P<mark><!-- not run: (?P<why>.+?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)
_LANGUAGES = {"sh", "python"}


class Block(NamedTuple):
    language: str
    code: str
    not_run: str | None


def blocks(page: str) -> list[Block]:
    text = (DOCS / page).read_text()
    return [Block(found["language"], found["code"], found["why"]) for found in _BLOCK.finditer(text)]


def runnable(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language in _LANGUAGES and block.not_run is None]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language(page: str) -> None:
    assert {block.language for block in blocks(page)} <= {*_LANGUAGES, "text", "toml", "yaml"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)])
def test_the_blocks_of_a_page_run_in_their_order(page: str, tmp_path: Path) -> None:
    script = [
        "set -euo pipefail",
        f'tq() {{ "{sys.executable}" -m transfer_queue.cli "$@"; }}',
        f'kubectl() {{ test "$1" = tq && "{sys.executable}" -m tq_operator.kubectl "${{@:2}}"; }}',
    ]
    for number, block in enumerate(runnable(page)):
        if block.language == "python":
            (tmp_path / f"{number}.py").write_text(block.code)
            script.append(f'"{sys.executable}" {number}.py')
        else:
            script.append(block.code)
    environ = {key: value for key, value in os.environ.items() if not key.startswith("TQ_")}
    environ.update(
        PATH=f"{Path(sys.executable).parent}:{environ['PATH']}",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "operator")]),
        XDG_STATE_HOME=str(tmp_path / "state"),
    )
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    left = [process for process in psutil.process_iter(["environ"]) if _belongs(process, tmp_path)]
    for process in left:
        process.kill()
    assert done.returncode == 0, done.stdout + done.stderr
    assert not left


def _belongs(process: psutil.Process, folder: Path) -> bool:
    return ((process.info["environ"] or {}).get("XDG_STATE_HOME") or "").startswith(str(folder))


def test_every_error_has_an_entry_in_troubleshooting() -> None:
    entries = set(re.findall(r"^### (\w+)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE))
    classes = {
        name
        for name, found in vars(errors).items()
        if isinstance(found, type) and issubclass(found, errors.TransferQueueError)
    }
    assert entries == classes


@pytest.mark.parametrize(
    ("page", "program", "commands"), [("command-line.md", "tq", app), ("kubectl.md", "kubectl tq", plugin)]
)
def test_every_command_is_in_the_table_of_commands(page: str, program: str, commands: Typer) -> None:
    listed = re.findall(rf"^\| `{program} ([\w-]+)` \|", (DOCS / page).read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(get_command(commands).commands)  # type: ignore[attr-defined]


def test_every_command_of_the_plugin_has_an_example() -> None:
    examples = "\n".join(block.code for block in blocks("kubectl.md"))
    for command in get_command(plugin).commands:  # type: ignore[attr-defined]
        assert f"kubectl tq {command} " in examples, command


@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},  # an advertisement, no warning
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    page = (tmp_path / "reference" / "api" / "index.html").read_text()
    for name in (
        "kv_batch_put",
        "kv_global_lock",
        "kv_update",
        "save_checkpoint",
        "dump_data_by_key",
        "GRPOGroupNSampler",
    ):
        assert f"{name}</span>" in page, name
    found = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    for words, location in (
        ("hard_prompts", "checkpoint/"),
        ("kv_global_lock", "reference/api/"),
        ("torchrun", "quickstart"),
    ):
        assert any(words in each["text"] and each["location"].startswith(location) for each in found), words
    assert "fonts.googleapis.com" not in page
