"""``kubectl tq logs``: the logs of all parts as one, each line behind the name of its pod."""

from __future__ import annotations

import heapq
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic.exceptions import NotFoundError
from urllib3.exceptions import HTTPError

from tq_operator.kubectl.access import Access
from tq_operator.plan.queue import Manifest
from tq_operator.runtime.cluster import ClusterError
from transfer_queue.errors import ConfigError

__all__ = ["Line", "Range", "follow", "merged", "parse_duration"]

_LOOK_S = 2.0
_AGAIN_S = 1.0
_TIMEOUT = (5.0, 3600.0)
"""Seconds to connect, and without a line until the client reconnects."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
Moment = tuple[float, int]
"""Seconds since 1970, and the digits after the second."""


@dataclass(frozen=True)
class Range:
    """Which lines: of the last ``since`` seconds, at most ``tail`` of each container; of the one ``previous`` to it."""

    since: int | None = None
    tail: int | None = None
    previous: bool = False

    def query(self) -> list[tuple[str, str]]:
        named = {"sinceSeconds": self.since, "tailLines": self.tail, "previous": "true" if self.previous else None}
        return [(name, str(value)) for name, value in named.items() if value is not None]


class Line(NamedTuple):
    """``source``: the pod, and its container where it has several."""

    moment: Moment
    source: str
    text: str


class _Source(NamedTuple):
    pod: str
    container: str
    name: str
    run: tuple[str, int]
    """uid of the pod, restarts of the container: a log of its own each."""
    started: bool


def parse_duration(text: str) -> int:
    """``90s``, ``10m``, ``1h30m`` -> seconds. Raises ConfigError."""
    parts = re.findall(r"(\d+)([smhd])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ConfigError(f"{text!r} is no duration; write for example 30s, 10m or 1h30m")
    return sum(int(number) * _UNITS[unit] for number, unit in parts)


def merged(access: Access, pods: list[Manifest], wanted: Range, unread: Callable[[str, str], None]) -> Iterator[Line]:
    """All lines in the order of their time. ``unread`` is told of containers whose log cannot be had, and why."""
    logs = []
    for source in _sources(pods):
        path = f"/api/v1/namespaces/{access.namespace}/pods/{source.pod}/log"
        query = [("container", source.container), ("timestamps", "true"), *wanted.query()]
        try:
            text = access.cluster.read(path, query)
        except ClusterError as error:
            unread(source.name, str(error))
        except NotFoundError:
            unread(source.name, "the pod is gone")
        else:
            logs.append([_line(source.name, line) for line in text.splitlines()])
    return heapq.merge(*logs)


def follow(
    access: Access, find_pods: Callable[[], list[Manifest]], wanted: Range, unread: Callable[[str, str], None]
) -> Iterator[Line]:
    """Lines as they come, for ever; those of pods and containers that start later too."""
    lines: queue.Queue[Line] = queue.Queue()
    followed: set[tuple[tuple[str, int], str]] = set()
    first, next_look = wanted, 0.0
    while True:
        if time.monotonic() >= next_look:
            for source in _sources(find_pods()):
                if source.started and (source.run, source.container) not in followed:
                    followed.add((source.run, source.container))
                    arguments = (access, source, first, lines.put, unread)
                    threading.Thread(target=_follow_one, args=arguments, daemon=True).start()
            first, next_look = Range(), time.monotonic() + _LOOK_S  # what starts later is shown whole
        try:
            yield lines.get(timeout=max(0.0, next_look - time.monotonic()))
        except queue.Empty:
            continue


def _follow_one(
    access: Access, source: _Source, wanted: Range, put: Callable[[Line], None], unread: Callable[[str, str], None]
) -> None:
    """Until the container ends; it reconnects after a loss and continues after the last line."""
    core: Any = client.CoreV1Api(access.api())
    last = (0.0, 0)
    while True:
        limits = {"since_seconds": wanted.since, "tail_lines": wanted.tail}
        try:
            answer = core.read_namespaced_pod_log(
                source.pod,
                access.namespace,
                container=source.container,
                follow=True,
                timestamps=True,
                **{name: value for name, value in limits.items() if value is not None},
                _preload_content=False,
                _request_timeout=_TIMEOUT,
            )
            with closing(answer):
                pending = b""
                for chunk in answer.stream(amt=None):
                    *whole, pending = (pending + chunk).split(b"\n")
                    for text in whole:
                        line = _line(source.name, text.decode(errors="replace"))
                        if line.moment > last:
                            last = line.moment
                            put(line)
        except ApiException as error:
            if error.status != 404:
                unread(source.name, str(error.reason))
            return
        except (HTTPError, OSError) as error:
            unread(source.name, f"{error}; reconnecting")
            time.sleep(_AGAIN_S)
            wanted = Range(since=int(time.time() - last[0]) + 2) if last[0] else wanted
        else:
            return


def _sources(pods: list[Manifest]) -> list[_Source]:
    found = []
    for pod in pods:
        name = pod["metadata"]["name"]
        states = {each["name"]: each for each in pod.get("status", {}).get("containerStatuses", [])}
        containers = [each["name"] for each in pod["spec"]["containers"]]
        for container in containers:
            state = states.get(container, {})
            started = bool({"running", "terminated"} & set(state.get("state", {})))
            shown = name if len(containers) == 1 else f"{name}/{container}"
            run = (pod["metadata"]["uid"], state.get("restartCount", 0))
            found.append(_Source(name, container, shown, run, started))
    return found


def _line(source: str, text: str) -> Line:
    stamp, _, words = text.partition(" ")
    return Line(_moment(stamp), source, words)


def _moment(stamp: str) -> Moment:
    """Of RFC 3339 with any number of digits after the second."""
    found = re.fullmatch(r"([-\dT:]+?)(?:\.(\d+))?(Z|[-+]\d\d:\d\d)", stamp)
    if found is None:
        return 0.0, 0  # of a runtime's own words before any line
    whole, digits, zone = found.groups()
    moment = datetime.fromisoformat(whole + ("+00:00" if zone == "Z" else zone))
    return moment.timestamp(), int((digits or "0").ljust(9, "0")[:9])
