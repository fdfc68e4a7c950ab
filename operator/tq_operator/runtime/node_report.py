"""``python -m tq_operator.runtime.node_report``: keeps the TQNode of the node that this pod runs on.

Environment: ``NODE_NAME``; ``TQ_NODE_ROOT``, the folder with the node's sys, dev and proc (default /host);
``TQ_NODE_SECONDS`` between two looks (default 60). Nothing is written while nothing changes.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tq_operator.api.node import NodeStatus
from tq_operator.fabric import node_status, rdma_condition
from tq_operator.runtime.cluster import Cluster, ClusterError
from tq_operator.runtime.main import api_client
from tq_operator.runtime.settings import number
from transfer_queue.errors import ConfigError, TransferQueueError
from transfer_queue.fabric import resolve

__all__ = ["main", "report_of"]

logger = logging.getLogger("tq_operator.node_report")


def report_of(root: Path, previous: Mapping[str, Any], now: str) -> dict[str, Any]:
    """The status of the node whose sys, dev and proc are below ``root``. A condition that stays keeps its time."""
    # The limits of this process say nothing about those that will move data.
    resolution = resolve(root, register_nbytes=0)
    condition = rdma_condition(resolution)
    old: Mapping[str, Any] = next(iter(previous.get("conditions", [])), {})
    since = old.get("lastTransitionTime", now) if old.get("status") == condition["status"] else now
    found = {**node_status(resolution), "conditions": [{**condition, "lastTransitionTime": since}]}
    return NodeStatus.model_validate(found).model_dump(by_alias=True, exclude_none=True)


def main() -> int:
    """Run until SIGTERM. An expected fault at the start is one line on stderr and exit code 1."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    stop = threading.Event()
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, lambda *_: stop.set())
    try:
        name, root = os.environ.get("NODE_NAME", ""), Path(os.environ.get("TQ_NODE_ROOT", "/host"))
        if not name:
            raise ConfigError("set NODE_NAME to the name of the node, from the field spec.nodeName of the pod")
        if not (root / "sys").is_dir():
            raise ConfigError(f"TQ_NODE_ROOT: {root} has no folder sys; mount the node's /sys, /dev and /proc there")
        seconds, cluster = number(os.environ, "TQ_NODE_SECONDS", 60.0), Cluster(api_client())
    except TransferQueueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    while not stop.is_set():
        try:
            _look(cluster, name, root)
        except ClusterError as error:
            logger.warning("no report: %s", error)
        stop.wait(seconds)
    return 0


def _look(cluster: Cluster, name: str, root: Path) -> None:
    """Raises ClusterError."""
    previous = (cluster.node_report(name) or {}).get("status", {})
    status = report_of(root, previous, datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))
    if status == previous:
        return
    node = cluster.node(name)
    if node is None:
        raise ClusterError(f"there is no node {name}")
    cluster.write_node_report(node, status)
    logger.info("%s: %s", name, status["summary"])


if __name__ == "__main__":
    sys.exit(main())
