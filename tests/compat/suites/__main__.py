"""``python -m tests.compat.suites CLIENT SNAPSHOT``: run a client's tests twice and print what differs.

SNAPSHOT is a checkout that you have; nothing of it is changed. The interpreter (``--python``) needs what the client
needs, and what this library needs. The release is fetched by pip into ``.tq/suites``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.compat.suites.clients import CLIENTS, Client
from tests.compat.suites.table import Outcomes, compare

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / ".tq" / "suites"
BESIDE = ("pyzmq", "hydra-core", "antlr4-python3-runtime==4.9.3")
"""What 0.1.x imports and this library does not."""
OWN_PLUGIN = "no:transfer_queue.storage.conformance.plugin"


def ours() -> Path:
    """A folder with this library and nothing else of this checkout."""
    folder = CACHE / "ours"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "transfer_queue"
    if not link.is_symlink():
        link.symlink_to(ROOT / "transfer_queue")
    return folder


def release(version: str, python: str) -> Path:
    """A folder with that release of ``TransferQueue``."""
    folder = CACHE / version
    if not (folder / "transfer_queue").is_dir():
        for package in (f"TransferQueue=={version}", *BESIDE):
            command = [python, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), package]
            subprocess.run(command, check=True)
    return folder


def run(client: Client, snapshot: Path, library: Path, python: str, timeout_s: float) -> Outcomes:
    """Outcome by test id: passed, failed, error or skipped."""
    with tempfile.TemporaryDirectory(prefix="tq-suites-") as name:
        folder = Path(name)
        for part in client.copied:
            source = snapshot / part
            if source.is_dir():
                shutil.copytree(source, folder / part)
            elif source.exists():
                shutil.copy(source, folder / part)
        tests = [path for path in client.tests if (folder / path).exists()]
        if not tests:
            raise SystemExit(f"{snapshot} has none of {', '.join(client.tests)}")
        report = folder / "report.xml"
        path = [str(library), *([str(snapshot)] if client.importable else [])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "RAY_USAGE_STATS_ENABLED": "0"}
        options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", OWN_PLUGIN, "--rootdir", name]
        command = [python, "-m", "pytest", *options]  # without a client's own -x, so that every test has an outcome
        done = subprocess.run(
            [*command, f"--junitxml={report}", *tests], cwd=folder, env=environ, timeout=timeout_s, check=False
        )
        if not report.exists():
            raise SystemExit(f"pytest ended with status {done.returncode} and no report")
        return read_report(report.read_text())


def read_report(text: str) -> Outcomes:
    """The outcomes in a JUnit report of pytest."""
    found: Outcomes = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = next((kind for kind in ("error", "failure", "skipped") if kind in kinds), "passed")
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome.replace("failure", "failed")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="make compat", description=__doc__)
    parser.add_argument("client", choices=sorted(CLIENTS))
    parser.add_argument("snapshot", type=Path, help="a checkout of the client")
    parser.add_argument("--release", default="0.1.11", help="of TransferQueue, to compare with")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has what the client needs")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of each of the two runs")
    given = parser.parse_args()
    client, snapshot = CLIENTS[given.client], given.snapshot.resolve()
    libraries = release(given.release, given.python), ours()
    outcomes = [run(client, snapshot, library, given.python, given.timeout) for library in libraries]
    text, differing = compare(*outcomes, reasons=client.reasons)
    print(text)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
