"""What this machine must offer before anything is started, installed where that is ours to do."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.commands import run
from tests.cluster.console import step
from tests.cluster.errors import ClusterError

CNI_FOLDER = Path("/usr/lib/cni")

# Program (name on PATH, or absolute path) -> the Debian package that brings it.
CLUSTER_PROGRAMS: Mapping[str, str] = {
    "runc": "runc",
    "nft": "nftables",
    "ip": "iproute2",
    "conntrack": "conntrack",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    str(CNI_FOLDER / "ptp"): "containernetworking-plugins",
}
IMAGE_PROGRAMS: Mapping[str, str] = {"buildah": "buildah", "debootstrap": "debootstrap"}

# Bits of the capability sets, from linux/capability.h.
CAPABILITIES: Mapping[str, int] = {"CAP_NET_ADMIN": 12, "CAP_SYS_CHROOT": 18, "CAP_SYS_ADMIN": 21, "CAP_MKNOD": 27}


def require_privileges() -> None:
    """Refuse to go on unless this process may make namespaces, mounts and links."""
    if sys.platform != "linux":
        raise ClusterError(f"the cluster needs Linux namespaces; this is {sys.platform}. Run it on a Linux machine.")
    if os.geteuid() != 0:
        raise ClusterError("the cluster needs root to make namespaces and mounts. Run the same command with sudo -E.")
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = int(next(line.split()[1] for line in lines if line.startswith("CapEff:")), 16)
    missing = [name for name, bit in CAPABILITIES.items() if not effective >> bit & 1]
    if missing:
        raise ClusterError(
            f"root lacks {', '.join(missing)} here, so namespaces and mounts cannot be made. "
            "In a container, start it with --privileged."
        )


def require_programs(programs: Mapping[str, str]) -> None:
    """Make sure that `programs` exist, installing their Debian packages if this process is root."""
    packages = sorted({package for program, package in programs.items() if not shutil.which(program)})
    if not packages:
        return
    install = "apt-get install " + " ".join(packages)
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise ClusterError(f"missing Debian packages: {' '.join(packages)}. Install them with: {install}")
    with step(f"installing Debian packages {' '.join(packages)}"):
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        run(["apt-get", "update", "-q"], environment=quiet, fix="Check the machine's package sources.")
        options = ["-qy", "--no-install-recommends"]
        run(["apt-get", "install", *options, *packages], environment=quiet, fix=f"Try: {install}")
    for program, package in programs.items():
        if not shutil.which(program):
            raise ClusterError(f"{package} is installed but {program} is not there. Check PATH for /usr/sbin.")
