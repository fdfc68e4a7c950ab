"""A virtual machine with real RDMA verbs: QEMU without hardware acceleration, Debian's kernel, soft-RoCE devices.

The guest's root is this machine's own ``/``, read-only over 9p under a tmpfs, so the checkout and its virtual
environment are simply there. It runs one program, and what that prints between ``RESULT`` and the end of the line comes
back. Nothing of it touches this machine's network or kernel.
"""

from __future__ import annotations

import compileall
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.commands import run
from tests.cluster.console import say, step
from tests.cluster.errors import ClusterError
from tests.cluster.host import require_programs

SOURCE = Path(__file__).resolve().parent
REPOSITORY = SOURCE.parent.parent
SECOND_INIT = SOURCE / "guest_init.sh"
RESULT = "RESULT "

PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "/bin/busybox": "busybox-static",
    "rdma": "iproute2",
    "ibv_devinfo": "ibverbs-utils",
    "sysctl": "procps",
    "setpriv": "util-linux",
}
PROVIDER = "ibverbs-providers"  # brings librxe, and no program
# In this order: soft-RoCE finds its checksum only if that is there before.
MODULES = (
    "virtio_pci", "virtio_rng", "9p", "9pnet_virtio", "overlay", "veth", "dummy",
    "crc32_generic", "crc32_pclmul", "rdma_rxe", "ib_uverbs", "rdma_ucm",
)  # fmt: skip


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "transferqueue" / "rdma"


def prepare() -> tuple[Path, Path]:
    """Install what is missing (as root), fetch the kernel, and return the paths of kernel and initial ramdisk."""
    require_programs(PROGRAMS)
    if not list(Path("/usr/lib").glob("*/libibverbs/librxe-*.so")):
        with step(f"installing Debian package {PROVIDER}"):
            run(["apt-get", "install", "-qy", "--no-install-recommends", PROVIDER], fix=f"Install {PROVIDER} yourself.")
    package = _kernel_package()
    folder = cache_folder() / package
    if not (folder / "complete").exists():
        with step(f"fetching {package}"):
            _fetch_kernel(package, folder)
    (version,) = os.listdir(folder / "root/lib/modules")
    ramdisk = folder / "initrd.gz"
    content = gzip.compress(_ramdisk(folder / "root/lib/modules" / version), 1, mtime=0)
    if not ramdisk.exists() or ramdisk.read_bytes() != content:
        ramdisk.write_bytes(content)
    return folder / f"root/boot/vmlinuz-{version}", ramdisk


def _kernel_package() -> str:
    """The package that Debian's ``linux-image-amd64`` stands for today, or the newest one fetched earlier."""
    for line in run(["apt-cache", "depends", "linux-image-amd64"], fix="Run: apt-get update").splitlines():
        kind, _, name = line.strip().partition(": ")
        if kind == "Depends" and name.startswith("linux-image-"):
            return name
    raise ClusterError("apt knows no linux-image-amd64, whose kernel the guest runs. Run: apt-get update")


def _fetch_kernel(package: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run(["apt-get", "-o", "APT::Sandbox::User=root", "download", package], cwd=folder, fix="Run: apt-get update")
    (archive,) = folder.glob("*.deb")
    run(["dpkg", "-x", archive, folder / "root"])
    archive.unlink()
    (version,) = os.listdir(folder / "root/lib/modules")
    run(["/bin/busybox", "depmod", "-b", folder / "root", version])
    (folder / "complete").touch()


# ------------------------------------------------------------------------------------------------------------- ramdisk


def _load_order(modules: Path) -> Iterator[Path]:
    """The files of MODULES and of what they depend on, each after its own dependencies."""
    needs: dict[str, list[str]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[path] = others.split()
    by_name = {Path(path).name.partition(".")[0].replace("-", "_"): path for path in needs}
    seen: set[str] = set()

    def visit(path: str) -> Iterator[str]:
        for other in reversed(needs[path]):
            yield from visit(other)
        if path not in seen:
            seen.add(path)
            yield path

    for name in MODULES:
        for path in visit(by_name[name]):
            yield modules / path.removeprefix("/")


def _ramdisk(modules: Path) -> bytes:
    """A cpio archive: busybox, the modules in their order, and the script that mounts the real root."""
    files: list[tuple[str, int, bytes]] = [(name, 0o040755, b"") for name in ("bin", "m", "proc", "sys", "dev")]
    files += [(name, 0o040755, b"") for name in ("low", "top", "new")]
    files.append(("bin/busybox", 0o100755, Path("/bin/busybox").read_bytes()))
    order = list(_load_order(modules))
    files += [(f"m/{path.name}", 0o100644, path.read_bytes()) for path in order]
    files.append(("m/order", 0o100644, "".join(f"{path.name}\n" for path in order).encode()))
    files.append(("init", 0o100755, (SOURCE / "ramdisk_init.sh").read_bytes()))
    return _cpio(files)


def _cpio(files: Iterable[tuple[str, int, bytes]]) -> bytes:
    """``files`` as (name, mode, content) in cpio's "newc" format."""
    out = io.BytesIO()
    for number, (name, mode, content) in enumerate([*files, ("TRAILER!!!", 0, b"")], 1):
        encoded = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
        out.write(b"070701" + b"".join(b"%08X" % value for value in fields) + encoded)
        out.write(b"\0" * (-out.tell() % 4) + content)
        out.write(b"\0" * (-out.tell() % 4))
    return out.getvalue()


# --------------------------------------------------------------------------------------------------------------- guest


def run_in_guest(
    program: Sequence[str | Path], log: Path, *, memory: str = "4G", timeout_s: float = 600.0
) -> dict[str, Any]:
    """Boot, run ``program`` as root in the checkout, power off. Its results by name; the console goes to ``log``.

    A program reports by printing ``RESULT {"name": …, …}`` lines. Raises ClusterError with the end of the console if it
    does not end by itself, or with an exit status other than 0.
    """
    kernel, ramdisk = prepare()
    # The guest writes no compiled files, and takes half a minute to compile what one process imports.
    for folder, depth in ((REPOSITORY / "transfer_queue", 9), (REPOSITORY / "tests", 0), (SOURCE, 0)):
        compileall.compile_dir(folder, maxlevels=depth, quiet=1)
    command = " ".join(str(word) for word in program)
    # Where the machine is busy, the kernel's check of the timer would fail, and the boot with it.
    append = (
        "console=ttyS0 quiet loglevel=4 mitigations=off nokaslr panic=-1 tsc=reliable no_timer_check"
        f" tq.init={SOURCE}/guest_init.sh"
    )
    arguments: list[str | Path] = [
        "qemu-system-x86_64", "-M", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max", "-smp", "2",
        "-m", memory, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio",
        "-kernel", kernel, "-initrd", ramdisk, "-append", f'{append} -- "{command}" "{REPOSITORY}"',
        "-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=root,mount_tag=hostroot",
        "-device", "virtio-rng-pci",
    ]  # fmt: skip
    started = time.monotonic()
    results: dict[str, Any] = {}
    status: int | None = None
    with log.open("w") as console:
        machine = subprocess.Popen(
            [str(word) for word in arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        watchdog = threading.Timer(timeout_s, machine.kill)
        watchdog.start()
        try:
            assert machine.stdout is not None
            for line in machine.stdout:
                stamp = f"{time.monotonic() - started:6.1f} s  "
                console.write(stamp + line.rstrip() + "\n")
                console.flush()
                _, found, text = line.partition(RESULT)
                if found:
                    value = json.loads(text)
                    results[value.pop("name")] = value
                    say(f"  {stamp}{text.strip()[:160]}")
                elif line.startswith("EXIT "):
                    status = int(line.split()[1])
        finally:
            watchdog.cancel()
            machine.kill()
            machine.wait()
            if machine.stdout is not None:
                machine.stdout.close()
    if status != 0:
        ended = f"ended with exit status {status}" if status is not None else f"did not end within {timeout_s:g} s"
        last = "".join(log.read_text().splitlines(keepends=True)[-40:])
        raise ClusterError(f"the program in the guest {ended}; the end of its console ({log}):\n{last}")
    return results


def main() -> int:
    """``python -m tests.rdma.guest PROGRAM …``: run a program of yours in the guest and show its console."""
    log = cache_folder() / "console.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        run_in_guest(sys.argv[1:] or ["rdma", "link"], log)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    print(log.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
