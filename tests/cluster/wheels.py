"""The wheels that images install, fetched on the machine, so that an image's build needs no package index."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.markers import Marker, default_environment

from tests.cluster.binaries import cache_lock
from tests.cluster.commands import run
from tests.cluster.console import say, step
from tests.cluster.errors import ClusterError
from tests.cluster.paths import REPOSITORY, cache_folder

IMAGE_PYTHON = "3.11"
IMAGE_GLIBC_MINOR = 36
BUILD_REQUIREMENT = "setuptools>=77"


def fetch_wheels(names: list[str]) -> Path:
    """Fill the wheel folder with what requirements/NAME.txt asks for, and return the folder.

    The hashes of the lock files are checked by pip, here and again in the image.
    """
    folder = cache_folder() / "wheels"
    with cache_lock("wheels"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            lock = REPOSITORY / "requirements" / f"{name}.txt"
            done = folder / f".{name}.fetched"
            if done.exists() and done.read_text() == lock.read_text():
                continue
            with step(f"fetching the wheels of requirements/{name}.txt"):
                _fetch(lock, folder)
            done.write_text(lock.read_text())
    return folder


def _fetch(lock: Path, folder: Path) -> None:
    entries = list(wanted_entries(lock.read_text()))
    hashed = [entry for entry in entries if "--hash=" in entry]
    listed = folder / ".requirements.txt"
    listed.write_text("".join(hashed))
    _download(folder, "--require-hashes", "-r", str(listed))
    for entry in entries:
        if "--hash=" not in entry:  # torch, which sites may have a CPU build of
            _download_torch(folder, entry.split(";")[0].strip())
    _download(folder, BUILD_REQUIREMENT)
    listed.unlink()


def wanted_entries(lock: str) -> Iterator[str]:
    """The entries of a lock file that count on the images' platform, without their markers.

    pip judges markers by the Python it runs on, which need not be the image's.
    """
    target = {key: str(value) for key, value in default_environment().items()}
    target |= {"python_version": IMAGE_PYTHON, "python_full_version": f"{IMAGE_PYTHON}.2"}
    entry = ""
    for line in [*lock.splitlines(keepends=True), "end"]:
        if line[0] not in " \t" and entry:
            head, separator, hashes = entry.partition(" \\\n")
            requirement, _, marker = head.partition(";")
            if not marker.strip() or Marker(marker).evaluate(target):
                yield requirement.strip() + (separator + hashes if separator else "\n")
            entry = ""
        if line.strip() and not line.startswith("#"):
            entry += line


def _download_torch(folder: Path, requirement: str) -> None:
    """A CPU build where one is to be had, else the index's own build with the CUDA libraries it loads."""
    try:
        _download(folder, f"{requirement}+cpu")
    except ClusterError:
        say(
            f"no CPU build of {requirement} found: the trainer image gets the one with CUDA, several GB. Else "
            "set PIP_FIND_LINKS to a folder that has its wheel, or PIP_EXTRA_INDEX_URL to an index of CPU builds."
        )
        _download(folder, requirement, with_dependencies=True)


def _download(folder: Path, *requirements: str, with_dependencies: bool = False) -> None:
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(IMAGE_GLIBC_MINOR, 4, -1)]
    options = ["--python-version", IMAGE_PYTHON, "--implementation", "cp", "--only-binary", ":all:"]
    for tag in (*tags, "manylinux2014_x86_64", "manylinux1_x86_64"):
        options += ["--platform", tag]
    if not with_dependencies:
        options.append("--no-deps")
    for link in (str(folder), *_find_links()):
        options += ["--find-links", link]
    run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder, *options, *requirements],
        environment={"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        fix="If packages cannot be downloaded, set PIP_INDEX_URL to an index that this machine reaches.",
    )


def _find_links() -> list[str]:
    """Folders of wheels that lie near the checkout, as the project's set-up finds them."""
    found = []
    for folder in (REPOSITORY.parent / "wheels", *sorted(REPOSITORY.parent.glob("*/wheels"))):
        unpack = folder / "unpack"  # such a folder may keep its wheels compressed; this prints where it put them
        if os.access(unpack, os.X_OK):
            found.append(run([unpack]).strip())
        elif folder.is_dir():
            found.append(str(folder))
    return found
