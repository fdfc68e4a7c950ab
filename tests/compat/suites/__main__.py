"""``python -m tests.compat.suites CLIENT SNAPSHOT``: run a client's tests twice and print what differs.

SNAPSHOT is a checkout that you have; nothing of it is changed. The interpreter (``--python``) needs what the client
needs, and what this library needs. The release is fetched by pip into ``.tq/suites``. Each file runs in a process of
its own, so that a file that hangs or kills its process costs its own outcomes only. Paths after SNAPSHOT choose among
the client's tests, scripts and loops. ``PYTHONPATH`` may add what the client needs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from tests.compat.suites.clients import CLIENTS, Client
from tests.compat.suites.table import Outcomes, compare

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / ".tq" / "suites"
DRIVERS = Path(__file__).parent / "drivers"
STANDIN = Path(__file__).parent / "standin"
BESIDE = ("pyzmq", "hydra-core", "antlr4-python3-runtime==4.9.3")
"""What 0.1.x imports and this library does not."""
PYTEST = (
    "-m",
    "pytest",
    "-q",
    "-o",
    "addopts=",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:transfer_queue.storage.conformance.plugin",
)
"""Without a client's own ``-x``, so that every test has an outcome, and without our own plugin."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_OVERRIDE_RESOURCES": '{"CPU": 32}',
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_register_timeout_seconds": "600",
}
"""Each run starts a Ray of its own: without a token in the home directory, and with more logical CPUs than a small
machine has, as each actor of a queue reserves one. For each of them Ray would start a worker before any is needed."""


def ours() -> Path:
    """A folder with this library and nothing else of this checkout."""
    folder = CACHE / "ours"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "transfer_queue"
    if not link.is_symlink():
        link.symlink_to(ROOT / "transfer_queue")
    return folder


def release(version: str, python: str) -> Path:
    """A folder with that release of ``TransferQueue``, or with the checkout of it or of a fork at that path."""
    checkout = Path(version).resolve()
    given = (checkout / "transfer_queue").is_dir()
    folder = CACHE / (f"checkout-{checkout.name}" if given else version)
    if given:
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / "transfer_queue"
        link.unlink(missing_ok=True)
        link.symlink_to(checkout / "transfer_queue")
    if not (folder / "zmq").is_dir():
        for package in (*(() if given else (f"TransferQueue=={version}",)), *BESIDE):
            command = [python, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), package]
            subprocess.run(command, check=True)
    return folder


def run(
    client: Client, snapshot: Path, library: Path, python: str, timeout_s: float, *, without_ray: bool = False
) -> Outcomes:
    """Outcome by test id: passed, failed, error, skipped or, for what did not end in ``timeout_s``, timeout."""
    program: list[str] = []
    pytest_options: list[str] = []
    if without_ray:
        program, pytest_options = ["-m", "without_ray"], ["-p", "without_ray"]
        client = replace(client, environ={**client.environ, "TQ_SUITES_NOTHING": " ".join(client.clustered)})
    with tempfile.TemporaryDirectory(prefix="tq-suites-") as name:
        folder = Path(name)
        for part in client.copied:
            source = snapshot / part
            if source.is_dir():
                shutil.copytree(source, folder / part, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, folder / part)
        path = [str(library), *([str(snapshot)] if client.importable else [])]
        path += [str(STANDIN)] if without_ray else []
        path += [given] if (given := os.environ.get("PYTHONPATH")) else []
        environ = {**ENVIRONMENT, **client.environ, **os.environ, "PYTHONPATH": os.pathsep.join(path)}
        found: Outcomes = {}
        for test in test_files(client.tests, folder):
            report = folder / "report.xml"
            report.unlink(missing_ok=True)
            ended = carry_out(
                [python, *PYTEST, *pytest_options, f"--rootdir={name}", f"--junitxml={report}", test],
                folder,
                environ,
                timeout_s,
            )
            found |= read_report(report.read_text()) if report.exists() else {test: ended.replace("passed", "failed")}
        for script in client.scripts:
            if (folder / script.split()[0]).exists():
                found[script.split()[0]] = carry_out([python, *program, *script.split()], folder, environ, timeout_s)
        for loop in client.loops:
            name, *arguments = loop.split()
            found[loop] = carry_out([python, *program, str(DRIVERS / name), *arguments], folder, environ, timeout_s)
    if not found:
        raise SystemExit(f"{snapshot} has none of {', '.join((*client.tests, *client.scripts))}")
    return found


def test_files(paths: Iterable[str], folder: Path) -> list[str]:
    """The files with tests at ``paths``, each once, in this order."""
    files = (file for path in paths for file in ([folder / path], sorted((folder / path).rglob("test_*.py"))))
    return list(dict.fromkeys(str(file.relative_to(folder)) for some in files for file in some if file.is_file()))


def carry_out(command: list[str], folder: Path, environ: Mapping[str, str], timeout_s: float) -> str:
    """passed, failed or timeout. Nothing that the command started is left."""
    with subprocess.Popen(command, cwd=folder, env=environ, start_new_session=True) as process:
        try:
            return "failed" if process.wait(timeout_s) else "passed"
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


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
    parser.add_argument("only", nargs="*", help="of the client's tests and scripts, those under these paths")
    parser.add_argument("--release", help="of TransferQueue, or the path of a checkout of it, to compare with")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has what the client needs")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of each file in each of the two runs")
    parser.add_argument(
        "--without-ray",
        action="store_true",
        help="with this release alone, Ray's calls replaced: standin/without_ray.py",
    )
    given = parser.parse_args()
    client, snapshot = CLIENTS[given.client].only(given.only), given.snapshot.resolve()
    if given.without_ray:
        found = run(client, snapshot, ours(), given.python, given.timeout, without_ray=True)
        expected = {test: "skipped" if outcome == "skipped" else "passed" for test, outcome in found.items()}
        text, differing = compare(expected, found, reasons=client.reasons)
        print("without Ray, against all passing:", text, sep="\n")
        return 1 if differing else 0
    libraries = release(given.release or client.release, given.python), ours()
    outcomes = [run(client, snapshot, library, given.python, given.timeout) for library in libraries]
    text, differing = compare(*outcomes, reasons=client.reasons)
    print(text)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
