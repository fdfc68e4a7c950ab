from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from transfer_queue.errors import StartError
from transfer_queue.storage.mooncake.engine import check_version, explain_load_error


@pytest.mark.parametrize("version", ["0.3.10.post1", "0.3.10.post2", "0.3.13", "0.4.0", "1.0", None])
def test_supported_versions_pass(version: str | None) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.3.10", "0.3.9", "0.2.12.post3"])
def test_old_versions_are_refused_with_the_needed_one(version: str) -> None:
    with pytest.raises(StartError, match=f"{version} is too old, 0.3.10.post1 or newer is needed: pip install"):
        check_version(version)


MISSING = "error while loading shared libraries: {}: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        (MISSING.format("libibverbs.so.1"), "needs libibverbs.so.1.*apt-get install libibverbs1$"),
        (MISSING.format("librdmacm.so.1"), "apt-get install librdmacm1$"),
        (MISSING.format("libnuma.so.1"), "apt-get install libnuma1$"),
        ("/opt/x/libnuma.so.1: file too short", "apt-get install libnuma1$"),
        ("libcuda.so.1: cannot open shared object file: No such file", "mooncake-transfer-engine-non-cuda$"),
        ("libcudart.so.12: cannot open shared object file: No such file", "mooncake-transfer-engine-non-cuda$"),
        (MISSING.format("libxyz.so.7"), "install the package that has libxyz.so.7$"),
        ("libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by x)", "upgrade libstdc\\+\\+6"),
        ("store.so: undefined symbol: ibv_create_qp_ex2", "ABI mismatch.*--force-reinstall"),
        ("/lib/libc.so.6: version `GLIBC_2.38' not found (required by x)", "build Mooncake from source"),
    ],
)
def test_loader_messages_become_the_fix(text: str, fix: str) -> None:
    reason = explain_load_error(text, "Mooncake")
    assert reason is not None
    assert re.search(fix, reason), reason


def test_other_messages_are_left_alone() -> None:
    assert explain_load_error("E1128 something else failed", "Mooncake") is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["store.cpython-299-x86_64-linux-gnu.so"], r"another Python than 3\.\d+ \(store.cpython-299"),
        ([], "Mooncake is not installed: pip install"),
    ],
)
def test_package_without_a_module_for_this_python_says_so(tmp_path: Path, files: list[str], message: str) -> None:
    folder = tmp_path / "mooncake"
    folder.mkdir()
    for name in ["__init__.py", *files]:
        (folder / name).touch()
    program = "from transfer_queue.storage.mooncake.engine import import_store; import_store()"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert re.search(f"StartError: .*{message}", done.stderr), done.stderr
