"""Scripts and the cluster tool remove what they noted as theirs, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.cluster.images import KEPT_ARCHIVES, remove_old_archives

ROOT = Path(__file__).resolve().parents[2]


def test_an_environment_that_the_set_up_did_not_make_is_refused_and_stays(tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "setup"
    script.parent.mkdir()
    shutil.copy(ROOT / "scripts" / "setup", script)
    mine = tmp_path / ".venv" / "bin" / "python"
    mine.parent.mkdir(parents=True)
    mine.write_text("of the user")
    done = subprocess.run(["sh", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert ".venv was not made by this script" in done.stderr
    assert mine.read_text() == "of the user"


def test_only_archives_that_were_noted_are_removed_the_oldest_first(tmp_path: Path) -> None:
    (tmp_path / "trainer-2024.tar").touch()
    (tmp_path / f"trainer-{'f' * 16}.tar").touch()  # of the user, though its name looks like one of ours
    for number in range(KEPT_ARCHIVES + 2):
        archive = tmp_path / f"trainer-{number:016x}.tar"
        archive.touch()
        remove_old_archives("trainer", archive)
    left = {f"trainer-{number:016x}.tar" for number in range(2, KEPT_ARCHIVES + 2)}
    assert {path.name for path in tmp_path.glob("*.tar")} == {"trainer-2024.tar", f"trainer-{'f' * 16}.tar", *left}
