"""``kubectl tq inject --dry-run``: pods as admission makes them, offline."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tq_operator.admission.preview import preview
from tq_operator.plan.queue import Manifest, queue_from
from transfer_queue.config.defaults import KIND
from transfer_queue.config.resource import TlsMode
from transfer_queue.errors import TransferQueueError

__all__ = ["injected"]


def injected(names: Sequence[str], namespace: str, default_tls: TlsMode = "operator") -> list[Manifest]:
    """The manifests of the files ``names`` without the queues among them, every pod as it would be.

    ``default_tls``: of queues that say nothing of TLS, the chart's value ``queues.tls``.

    Raises TransferQueueError for a file that cannot be read and a pod that would be refused.
    """
    try:
        documents = [document for name in names for document in _read(name)]
        queues = {}
        for document in documents:
            if document.get("kind") == KIND:
                document["metadata"] = {"namespace": namespace, **(document.get("metadata") or {})}
                queue = queue_from(document, default_tls)
                queues[queue.namespace, queue.name] = queue
        return [preview(item, queues, namespace) for item in documents if item.get("kind") != KIND]
    except (ValueError, OSError) as error:
        raise TransferQueueError(str(error)) from None


def _read(name: str) -> list[dict[str, Any]]:
    text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    try:
        found = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise ValueError(f"{name}: is not YAML: {' '.join(str(error).split())}") from None
    if not all(isinstance(each, dict) and isinstance(each.get("metadata") or {}, dict) for each in found):
        raise ValueError(f"{name}: holds something other than Kubernetes objects")
    return found
