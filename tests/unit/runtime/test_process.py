from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from transfer_queue._printable import PrintableFormatter

SERVER = """
import asyncio, sys
from transfer_queue.config.document import Document
from transfer_queue.runtime.process import run_process

class Settings(Document):
    pass

async def serve(settings, stop, path):
    def work():
        raise {error}("by half")
    asyncio.get_running_loop().call_soon(work)
    asyncio.get_running_loop().call_later(0.2, stop.set)
    await stop.wait()
    print("went on")

sys.exit(run_process(Settings, serve, "server"))
"""


def run(folder: Path, error: str) -> subprocess.CompletedProcess[str]:
    (folder / "settings.yaml").write_text("{}")
    command = [sys.executable, "-c", SERVER.format(error=error), "--config", str(folder / "settings.yaml")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_server_without_memory_ends_at_once_and_says_so(tmp_path: Path) -> None:
    ended = run(tmp_path, "MemoryError")
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "error: out of memory" in ended.stderr


def test_a_server_goes_on_after_any_other_error_of_a_callback(tmp_path: Path) -> None:
    ended = run(tmp_path, "ValueError")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "went on\n"
    assert "ValueError: by half" in ended.stderr


def test_a_server_that_cannot_see_the_end_of_its_parent_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("{}")
    command = [sys.executable, "-c", SERVER.format(error="ValueError"), "--config", str(tmp_path / "settings.yaml")]
    ended = subprocess.run(
        [*command, "--die-with-parent"],
        preexec_fn=lambda: os.close(0),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error: --die-with-parent: standard input is closed")


def test_logs_of_servers_have_no_control_characters() -> None:
    hostile = "p\x1b[2J\u202e\r\nERROR all is lost"
    try:
        raise ValueError(hostile)
    except ValueError:
        record = logging.LogRecord("server", logging.ERROR, "", 1, "request for %s", (hostile,), sys.exc_info())
    first, *trace = PrintableFormatter().format(record).split("\n")
    assert first.endswith(r"server: request for p\x1b[2J\u202e\r\nERROR all is lost")
    assert all(line.isprintable() for line in trace)
