"""``kubectl tq support-bundle``: what somebody else needs to see to help, as one archive without secrets."""

from __future__ import annotations

import base64
import io
import os
import re
import tarfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from kubernetes.dynamic.exceptions import NotFoundError

from tq_operator.kubectl.access import Access
from tq_operator.kubectl.checks import Finding, find_operators
from tq_operator.kubectl.logs import Range, merged
from tq_operator.kubectl.overview import pod_summary
from tq_operator.kubectl.redaction import Redactor, references
from tq_operator.plan.names import INJECTED_ANNOTATION
from tq_operator.plan.queue import Manifest
from tq_operator.runtime.cluster import ClusterError
from transfer_queue import __version__
from transfer_queue._printable import printable_lines
from transfer_queue.cli.output import dumped
from transfer_queue.errors import ConfigError

__all__ = ["collect", "write_archive"]

_NODE_KEPT = ("conditions", "allocatable", "capacity", "nodeInfo")
_LINES = 20_000
"""Of each log, the last ones."""
_METRICS_PORT = re.compile(r"(?:metrics|health)(-\d+)?")
"""Of several shards each has a number behind the name."""


class _Collector:
    """Gathers files. What cannot be had is noted with the reason, and the rest goes on."""

    def __init__(self, access: Access, progress: Callable[[str], None]) -> None:
        self.access = access
        self.redactor = Redactor()
        self.files: dict[str, Any] = {}
        self.unread: dict[str, str] = {}
        self._progress = progress

    def object(self, name: str, found: Any) -> None:
        self.files[name] = self.redactor.manifest(found)

    def attempt(self, what: str, read: Callable[[], Any], otherwise: Any) -> Any:
        self._progress(what)
        try:
            return read()
        except ClusterError as error:
            self.unread[what] = str(error)
        except NotFoundError:
            self.unread[what] = "it is not there"
        return otherwise

    def learn_references(self, namespace: str, pods: list[Manifest], own: set[str]) -> None:
        """Read what Secrets and foreign ConfigMaps tell the pods, only to take it out of their logs."""
        for kind, name in sorted({reference for pod in pods for reference in references(pod)}):
            if kind == "ConfigMap" and name in own:
                continue
            path = f"/api/v1/namespaces/{namespace}/{kind.lower()}s/{name}"
            found = self.attempt(f"{kind.lower()} {name}", partial(self.access.cluster.call, "GET", path), {})
            for value in (found.get("data") or {}).values():
                self.redactor.learn(_decoded(value) if kind == "Secret" else value)

    def pods(self, folder: str, namespace: str, pods: list[Manifest]) -> None:
        """Objects, logs of now and of before the last restart, metrics."""
        access = Access(self.access.configuration, namespace)
        for pod in pods:
            name = pod["metadata"]["name"]
            self.object(f"{folder}/{name}.yaml", {"apiVersion": "v1", "kind": "Pod", **pod})
            self._logs(access, f"{folder}/{name}.log", pod, Range(tail=_LINES))
            if any(each.get("restartCount") for each in pod.get("status", {}).get("containerStatuses", [])):
                self._logs(access, f"{folder}/{name}.previous.log", pod, Range(tail=_LINES, previous=True))
            for what, port in _metrics_ports(pod).items():
                path = f"/api/v1/namespaces/{namespace}/pods/{name}:{port}/proxy/metrics"
                text = self.attempt(f"{folder}/{name}.{what}", partial(access.cluster.read, path), "")
                if text:
                    self.files[f"{folder}/{name}.{what}"] = text

    def _logs(self, access: Access, file: str, pod: Manifest, wanted: Range) -> None:
        self._progress(file)
        lines = merged(access, [pod], wanted, lambda source, why: self.unread.update({f"{file} ({source})": why}))
        if text := "".join(f"{line.source}  {line.text}\n" for line in lines):
            self.files[file] = text

    def events(self, file: str, namespace: str) -> None:
        path = f"/api/v1/namespaces/{namespace}/events"
        found = self.attempt(file, lambda: self.access.cluster.call("GET", path), {})
        if items := found.get("items"):
            self.files[file] = [self.redactor.manifest(item) for item in items]


def collect(
    access: Access, queue: Manifest, findings: list[Finding], progress: Callable[[str], None] = lambda words: None
) -> dict[str, str]:
    """The files of the archive by name, without secrets. Raises ClusterError only if the queue itself is gone."""
    name, namespace = queue["metadata"]["name"], queue["metadata"]["namespace"]
    collector = _Collector(access, progress)
    collector.object("queue.yaml", queue)
    children = collector.attempt("objects", lambda: access.cluster.children(namespace, name), {})
    for (kind, child), found in children.items():
        collector.object(f"objects/{kind}-{child}.yaml", found)
    pods = collector.attempt("pods", lambda: access.pods(name), [])
    collector.learn_references(namespace, pods, {child for kind, child in children if kind == "ConfigMap"})
    collector.pods("pods", namespace, pods)
    collector.events("events.yaml", namespace)
    users = collector.attempt("users", lambda: access.cluster.pods([], name), [])
    users = [pod for pod in users if INJECTED_ANNOTATION in (pod["metadata"].get("annotations") or {})]
    # Their specs are other people's: only how they are.
    collector.files["users.yaml"] = [{"namespace": pod["metadata"]["namespace"], **pod_summary(pod)} for pod in users]
    for operator in collector.attempt("operator", lambda: find_operators(access), []):
        place, chosen = operator["metadata"]["namespace"], operator["spec"]["selector"]["matchLabels"]
        collector.object(f"operator/{operator['metadata']['name']}.yaml", operator)
        path = f"/api/v1/namespaces/{place}/pods"
        query = [("labelSelector", ",".join(f"{key}={value}" for key, value in chosen.items()))]
        listed = collector.attempt(f"pods in {place}", partial(access.cluster.call, "GET", path, query=query), {})
        found = listed.get("items", [])
        collector.learn_references(place, found, set())
        collector.pods("operator", place, found)
        collector.events(f"operator/events-{place}.yaml", place)
    nodes = collector.attempt("nodes", lambda: access.cluster.call("GET", "/api/v1/nodes")["items"], [])
    collector.files["nodes.yaml"] = [_node(node) for node in nodes]
    collector.files["doctor.yaml"] = [finding._asdict() for finding in findings]
    collector.files["about.yaml"] = {
        "queue": f"{namespace}/{name}",
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "plugin": __version__,
        "unread": collector.unread,
    }
    return {file: _written(content, collector.redactor) for file, content in collector.files.items()}


def _written(content: Any, redactor: Redactor) -> str:
    """As people read it on a terminal too: without control characters."""
    if not isinstance(content, str):
        plain = redactor.strings(content)
        content = dumped(lambda ascii_only: yaml.safe_dump(plain, sort_keys=False, allow_unicode=not ascii_only))
    return printable_lines(redactor.text(content))


def write_archive(file: Path, files: dict[str, str]) -> None:
    """A tar.gz that only its owner can read. Raises ConfigError if the file is there or cannot be written."""
    folder = file.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz")
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as target, tarfile.open(fileobj=target, mode="w:gz") as archive:
            for name, text in sorted(files.items()):
                content = text.encode()
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(content))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; name another file with --file") from None


def _metrics_ports(pod: Manifest) -> dict[str, int]:
    """By the endings of their files, the first of each."""
    ports: dict[str, int] = {}
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", []):
            if found := _METRICS_PORT.fullmatch(port.get("name", "")):
                ports.setdefault(f"metrics{found[1] or ''}", int(port["containerPort"]))
    return ports


def _node(node: Manifest) -> Manifest:
    status = node.get("status", {})
    return {"name": node["metadata"]["name"], **{key: status[key] for key in _NODE_KEPT if key in status}}


def _decoded(value: str) -> str:
    return base64.b64decode(value).decode(errors="replace")
