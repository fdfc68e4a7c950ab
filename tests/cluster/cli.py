"""The command line: python -m tests.cluster up | down | env | load IMAGE | images | status | build."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from tests.cluster import cluster, images
from tests.cluster.binaries import BINARIES, TEST_BINARIES, build_binaries
from tests.cluster.console import say
from tests.cluster.errors import ClusterError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0 done, 1 failed (with the reason on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description="A real two-node Kubernetes cluster.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build the binaries only, those of tests too")
    commands.add_parser("up", help="bring the cluster up")
    commands.add_parser("down", help="remove it and everything it left")
    commands.add_parser("status", help="show its programs and nodes; exit status 1 unless all is well")
    commands.add_parser("env", help="print shell commands that point kubectl, helm and python at it")
    load = commands.add_parser("load", help="put an image on every node")
    load.add_argument("image", help="a folder name of images/, an OCI archive, or an image in buildah's storage")
    build = commands.add_parser("images", help="build images from images/")
    build.add_argument("names", nargs="*", help="folder names of images/ (default: all but ray)")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a stopped start cleans up
    try:
        return _run(options)
    except ClusterError as error:
        say(f"error: {error}")
        return 1
    except OSError as error:  # the last boundary: a full disk, say, needs no stack to be understood
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(options: argparse.Namespace) -> int:
    if options.command == "build":
        print(*map(build_binaries, (BINARIES, TEST_BINARIES)), sep="\n")
    elif options.command == "up":
        cluster.up()
    elif options.command == "down":
        cluster.down()
    elif options.command == "env":
        print(cluster.environment())
    elif options.command == "load":
        print("\n".join(cluster.require_cluster().load(options.image)))
    elif options.command == "images":
        for name in options.names or [name for name in images.image_names() if name != "ray"]:
            print(images.build_image(name))
    else:
        table, healthy = cluster.status()
        print(table)
        return 0 if healthy else 1
    return 0
