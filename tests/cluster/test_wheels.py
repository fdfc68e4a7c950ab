"""Which entries of a lock file an image installs."""

from __future__ import annotations

from tests.cluster.wheels import wanted_entries

LOCK = """\
# Made by a tool.
always==1.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
old==1.0 ; python_full_version < '3.11' \\
    --hash=sha256:cc
new==2.0 ; python_full_version == '3.11.*' \\
    --hash=sha256:dd
elsewhere==1.0 ; sys_platform == 'win32' \\
    --hash=sha256:ee
torch==2.13.0
last==1.0 \\
    --hash=sha256:ff
"""


def test_entries_count_by_the_image_s_python_whatever_runs_the_tool() -> None:
    names = [entry.split("==")[0] for entry in wanted_entries(LOCK)]
    assert names == ["always", "new", "torch", "last"]


def test_an_entry_keeps_its_hashes_and_loses_its_marker() -> None:
    entries = list(wanted_entries(LOCK))
    assert entries[0] == "always==1.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
    assert entries[1] == "new==2.0 \\\n    --hash=sha256:dd\n"
    assert entries[2] == "torch==2.13.0\n"
