"""``kubectl tq``: the plugin ``kubectl-tq``. ``kubectl tq inject --dry-run -f pod.yaml -f queue.yaml``, offline."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from tq_operator.admission.preview import preview
from tq_operator.plan.queue import queue_from
from transfer_queue.config.defaults import KIND
from transfer_queue.errors import TransferQueueError

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 with one line on stderr if a file cannot be read or a pod would be refused."""
    parser = argparse.ArgumentParser(prog="kubectl tq", description="TransferQueue in Kubernetes.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inject = commands.add_parser("inject", help="show pods as admission makes them")
    inject.add_argument("--dry-run", action="store_true", required=True, help="print only; the webhook does the rest")
    inject.add_argument(
        "-f", "--filename", action="append", required=True, help="manifests, TransferQueues among them; - is stdin"
    )
    inject.add_argument("-n", "--namespace", default="default", help="of manifests that name none")
    inject.add_argument("--tls", choices=["operator", "off"], default="operator", help="the chart's value queues.tls")
    options = parser.parse_args(arguments)
    try:
        documents = [document for name in options.filename for document in _read(name)]
        queues = {}
        for document in documents:
            if document.get("kind") == KIND:
                document.setdefault("metadata", {}).setdefault("namespace", options.namespace)
                queue = queue_from(document, options.tls)
                queues[queue.namespace, queue.name] = queue
        shown = [preview(item, queues, options.namespace) for item in documents if item.get("kind") != KIND]
    except (TransferQueueError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    sys.stdout.write(yaml.safe_dump_all(shown, sort_keys=False))
    return 0


def _read(name: str) -> list[dict[str, Any]]:
    text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    try:
        found = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise ValueError(f"{name}: is not YAML: {' '.join(str(error).split())}") from None
    if not all(isinstance(document, dict) for document in found):
        raise ValueError(f"{name}: holds something other than Kubernetes objects")
    return found


if __name__ == "__main__":
    sys.exit(main())
