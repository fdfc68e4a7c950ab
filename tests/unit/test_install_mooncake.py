"""``scripts/install-mooncake``: one prefix, undoable, nothing of the system touched.

The source here is a small one that installs as Mooncake does; Mooncake itself takes longer to build than a test may.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install-mooncake"
CMAKE = """
cmake_minimum_required(VERSION 3.16)
project(Stub LANGUAGES NONE)
execute_process(COMMAND ${PYTHON_EXECUTABLE} -c "import sys; print([s for s in sys.path if 'packages' in s][0], end='')"
                OUTPUT_VARIABLE PYTHON_SYS_PATH)
file(WRITE ${CMAKE_BINARY_DIR}/store.py "VERSION = 'built'\\n")
file(WRITE ${CMAKE_BINARY_DIR}/mooncake_master "#!/bin/sh\\n")
install(FILES ${CMAKE_BINARY_DIR}/store.py DESTINATION ${PYTHON_SYS_PATH}/mooncake)
install(PROGRAMS ${CMAKE_BINARY_DIR}/mooncake_master DESTINATION bin)
"""
HEADERS = "cmake_minimum_required(VERSION 3.16)\nproject(Headers LANGUAGES NONE)\n"


def install(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    (home / "tmp").mkdir(exist_ok=True)
    return subprocess.run(
        [str(SCRIPT), "--python", sys.executable, *arguments],
        env={**os.environ, "TMPDIR": str(home / "tmp")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    for name, text in (("mooncake", CMAKE), ("rpc", HEADERS)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "CMakeLists.txt").write_text(text)
    return ["--skip-checks", "--source", str(tmp_path / "mooncake"), "--rpc-source", str(tmp_path / "rpc")]


def test_everything_lies_in_the_prefix_works_from_there_and_is_undone(tmp_path: Path, sources: list[str]) -> None:
    prefix = tmp_path / "prefix"
    for _ in range(2):  # a second build replaces the first
        done = install(*sources, "--prefix", str(prefix), home=tmp_path)
        assert done.returncode == 0, done.stderr
    found = subprocess.run(
        ["/bin/sh", "-c", f". {prefix}/env.sh; python3 -c 'import mooncake.store as s; print(s.__file__, s.VERSION)'; "
         "command -v mooncake_master"],
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()  # fmt: skip
    assert found[0].startswith(f"{prefix}/python/")
    assert found[0].endswith("mooncake/store.py built")
    assert found[1] == f"{prefix}/bin/mooncake_master"
    assert list((tmp_path / "tmp").iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "mooncake").iterdir()) == ["CMakeLists.txt"]
    assert install("--uninstall", "--prefix", str(prefix), home=tmp_path).returncode == 0
    assert not prefix.exists()


def test_build_that_would_write_elsewhere_is_refused_and_leaves_nothing(tmp_path: Path, sources: list[str]) -> None:
    elsewhere = tmp_path / "elsewhere"
    with (tmp_path / "mooncake" / "CMakeLists.txt").open("a") as file:
        file.write(f"install(FILES ${{CMAKE_BINARY_DIR}}/store.py DESTINATION {elsewhere})\n")
    done = install(*sources, "--prefix", str(tmp_path / "prefix"), home=tmp_path)
    assert done.returncode != 0
    assert f"would install outside of {tmp_path}/prefix: {elsewhere}/store.py" in done.stderr
    assert not elsewhere.exists()
    assert not (tmp_path / "prefix").exists()


def test_dry_run_prints_the_steps_in_order_and_changes_nothing(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    done = install("--tag", "v1", "--prefix", str(prefix), "--dry-run", home=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = [line.split()[1:4] for line in done.stdout.splitlines() if line.startswith("+ ")]
    programs = [step[0] if step[0] != "git" else f"git {step[1] if step[1] != '-C' else 'in'}" for step in steps]
    fetch = ["git clone", "git in", "git in"]
    build = [sys.executable, "cmake", "cmake", "cmake", "cmake", "cmake", "env", "rm", "mkdir", "mv"]
    assert programs == [*fetch, *fetch, *build]
    assert "checkout --detach v1" in done.stdout
    assert not prefix.exists()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not any(word in done.stdout for word in ("+ apt", "+ dpkg", "+ sudo", "+ ldconfig"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tag", "v1", "--prefix", "/usr/local"], "--prefix /usr/local belongs to the system"),
        (["--tag", "v1", "--prefix", "/opt/../usr/lib/x"], "--prefix /usr/lib/x belongs to the system"),
        (["--tag", "v1", "--prefix", "relative"], "--prefix must be an absolute path"),
        (["--prefix", "/opt/tq-none"], "name --source DIR or --tag TAG"),
        (["--tag", "v1", "--source", "/x"], "--source and --tag exclude each other"),
        (["--source", "/nowhere"], "/nowhere is no source folder"),
        (["--uninstall", "--prefix", "/opt/tq-none"], "nothing of this script is in /opt/tq-none"),
        (["--speed"], "unknown option --speed"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = install(*arguments, "--dry-run", home=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr


def test_folder_that_the_script_did_not_make_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "file").write_text("mine")
    for action in (["--tag", "v1"], ["--uninstall"]):
        done = install(*action, "--prefix", str(tmp_path / "own"), home=tmp_path)
        assert done.returncode != 0
        assert "was not made by this script" in done.stderr
    assert (tmp_path / "own" / "file").read_text() == "mine"
