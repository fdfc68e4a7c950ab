"""``python -m transfer_queue.fabric``: show GPUs, HCAs and the choice. ``... resolve``: write it down for a container.

Exit status: 0; 1 if RDMA is required and cannot be used; 2 for a wrong argument or setting.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from transfer_queue.errors import ConfigError
from transfer_queue.fabric.report import document, environment_lines, table
from transfer_queue.fabric.resolve import Resolution, resolve


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(_with_default_command(sys.argv[1:] if arguments is None else arguments))
    try:
        resolution = resolve(
            options.root,
            os.environ,
            policy=options.policy,
            protocol=options.protocol,
            device_name=options.device_name,
            exclude=tuple(name for name in options.exclude.split(",") if name),
            topology_file=options.topology_file,
            register_nbytes=options.register_bytes,
        )
        if options.command == "resolve":
            _write(resolution, Path(options.out), options.failover)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(document(resolution), indent=2))
    else:
        print(table(resolution))
    if resolution.decision.transport == "refused":
        print(f"error: RDMA is required but cannot be used: {resolution.decision.reason}", file=sys.stderr)
        return 1
    return 0


def _write(resolution: Resolution, out: Path, failover: bool) -> None:
    """Write fabric.json, mooncake-topology.json and fabric.env, each complete or not at all."""
    if failover and resolution.decision.policy == "required":
        raise ConfigError(
            "--failover needs Mooncake's auto-discovery, which may fall back to TCP: drop it or use the policy auto"
        )
    out.mkdir(parents=True, exist_ok=True)
    facts = document(resolution)
    topology = out / "mooncake-topology.json"
    _replace(out / "fabric.json", json.dumps(facts, indent=2) + "\n")
    _replace(topology, json.dumps(facts["topology"], indent=2) + "\n")
    _replace(out / "fabric.env", environment_lines(resolution.decision, str(topology) if failover else None))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m transfer_queue.fabric", description="GPUs and RDMA devices")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--root", default="/", help="directory that holds sys, dev and proc (default /)")
    common.add_argument("--policy", choices=("off", "auto", "required"), default="auto", help="default auto")
    common.add_argument("--protocol", choices=("rdma", "tcp"), default="rdma", help="default rdma")
    common.add_argument("--device-name", default="auto", help="names or patterns with commas instead of a choice")
    common.add_argument("--exclude", default="", help="names or patterns with commas never to use")
    common.add_argument("--topology-file", help="topology in NCCL's XML format (default: NCCL_TOPO_FILE if readable)")
    common.add_argument("--register-bytes", type=int, default=1 << 30, help="memory to be registered (default 1 GiB)")
    common.add_argument("--json", action="store_true", help="print a JSON document")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("show", parents=[common], help="print the table (default)")
    write = commands.add_parser("resolve", parents=[common], help="print and write files for another container")
    write.add_argument("--out", default="/run/tq-fabric", help="directory for the files (default /run/tq-fabric)")
    write.add_argument("--failover", action="store_true", help="let Mooncake fall back to farther HCAs by itself")
    return parser


def _with_default_command(arguments: Sequence[str]) -> list[str]:
    """``show`` is implied, so that options may come first."""
    known = arguments and arguments[0] in ("show", "resolve", "-h", "--help")
    return list(arguments) if known else ["show", *arguments]


if __name__ == "__main__":
    sys.exit(main())
