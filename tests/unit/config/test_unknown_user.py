"""A process runs as a user whom the machine does not know, as pods do where the platform chooses the user."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, pathlib
from transfer_queue.config.trouble import state_root, trouble_at
if os.getuid() == 0:
    os.setuid(1000650000)
else:  # only root can become somebody else
    pathlib.Path.home = classmethod(lambda _: (_ for _ in ()).throw(RuntimeError()))
print(state_root())
"""


def test_its_missing_home_is_no_fault() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={"PATH": ""}, capture_output=True, text=True, check=False
    )
    assert done.stdout == "/.local/state/transferqueue\n", done.stderr
