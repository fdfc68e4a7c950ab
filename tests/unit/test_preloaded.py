"""A preloaded program is to its caller what a process of ``subprocess`` is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import preloaded

SHOWN = "import os, sys; print(os.getppid(), __name__, sys.argv[-1], os.getcwd(), os.environ['OURS'], sys.path[1])"


@pytest.mark.parametrize("kind", ["-c", "-m", ""])
def test_a_program_has_its_own_environment_folder_arguments_and_exit_status(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "shown.py"
    script.write_text(f"{SHOWN}\nprint('torch' in sys.modules, 'transfer_queue' in sys.modules)\nsys.exit(3)")
    what = {"-c": ["-c", script.read_text()], "-m": ["-m", "shown"], "": [str(script)]}[kind]
    environ = {**os.environ, "OURS": "yes", "PYTHONPATH": "/nowhere"}
    done = preloaded.run([sys.executable, *what, "last"], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert done.stdout == f"{os.getpid()} __main__ last {tmp_path} yes /nowhere\nTrue False\n"


def test_a_program_can_be_killed_and_is_gone() -> None:
    code = "import sys; print('here', flush=True); sys.stdin.read()"
    with preloaded.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == b"here\n"
        program.kill()
        assert program.wait() == -9
    assert not Path(f"/proc/{program.pid}").exists()
