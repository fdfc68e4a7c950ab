"""Checks of settings and of the queue that they name: controller, storage units, Mooncake's servers."""

from __future__ import annotations

import os
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from transfer_queue.cli.findings import Finding, Subject, View, fail, ok, warn
from transfer_queue.cli.state import read_running
from transfer_queue.cli.up import load_resource
from transfer_queue.client.options import ClientOptions
from transfer_queue.config.attach import attach_from_environment, parse_address
from transfer_queue.config.variables import check_values, misspelt
from transfer_queue.errors import ConfigError
from transfer_queue.launch.plan import plan_local
from transfer_queue.storage.mooncake.admin import Admin

__all__ = ["controller", "inside", "proxy", "resource_file", "restarts", "settings"]

_CLOCK_S = 1.0
_FULL = 0.9
_MOST_UNITS = 32
_WAIT_S = 3.0
_INSTALL_SAME = "install the same version of TransferQueue here and at the servers"


def settings(subject: Subject) -> Iterator[Finding]:
    """TQ_ variables and the file that one of them names."""
    for text in misspelt():
        yield warn("settings", text, "correct the name, or unset it")
    try:
        found = attach_from_environment()
    except ConfigError as error:
        yield fail("settings", str(error), "correct the file or variable, or unset it; tq status shows the right one")
        return
    try:
        if found is not None:
            ClientOptions.of(found)
            name = "TQ_CONFIG_FILE" if os.environ.get("TQ_CONFIG_FILE") else "TQ_CONTROLLER_ADDRESS"
            yield ok("settings", f"{name} names the controller at {', '.join(found.controller.addresses)}")
        else:
            check_values()
            text = "no TQ_CONFIG_FILE, no TQ_CONTROLLER_ADDRESS: init() starts a queue of its own"
            if running := read_running():
                fix = f"export TQ_CONFIG_FILE={running[0].attach_file}"
                yield warn("settings", f"{text}, and does not use queue {running[0].name}, which runs here", fix)
            else:
                yield ok("settings", text)
    except ConfigError as error:
        yield fail("settings", str(error), "correct the variable, or unset it")


def resource_file(subject: Subject) -> Iterator[Finding]:
    if subject.file is None:
        return
    try:
        wanted = load_resource(subject.file)
        plan_local(wanted)
    except ConfigError as error:
        for line in str(error).splitlines():
            yield fail("resource", line, f"correct {subject.file}")
        return
    yield ok("resource", f"{subject.file} describes queue {wanted.metadata.name}, backend {wanted.spec.backend.kind}")


def controller(subject: Subject) -> Iterator[Finding]:
    view = subject.view
    if view is None:
        return
    if not isinstance(view, View):
        text = str(view)
        if "protocol" in text:
            yield fail("controller", f"versions differ: {text}", _INSTALL_SAME)
        else:
            yield fail(
                "controller",
                text,
                "check that it runs (tq status, kubectl get tq), that the address is right, and that no firewall or "
                "network policy is between",
            )
        return
    picture = view.picture
    yield ok(
        "controller", f"queue {picture['queue']} at {view.address}, backend {view.backend}, {picture['rows']} rows"
    )
    yield _clock(picture)
    yield from inside(picture, reach=True)
    if view.backend == "mooncake":
        yield from _mooncake(view.settings)


def restarts(subject: Subject) -> Iterator[Finding]:
    """Servers of a queue of this machine that ended and were started again."""
    meant = set() if subject.attach is None else set(subject.attach.controller.addresses)
    for queue in read_running():
        if queue.controller in meant and queue.restarts:
            last, count = queue.restarts[-1], len(queue.restarts)
            when = datetime.fromtimestamp(last.at).strftime("%d %b %H:%M:%S")
            yield warn(
                "restarts",
                f"{count} restart{'s' * (count > 1)} of servers of queue {queue.name}, last {when}: {last.what}",
                "its folder, which tq status shows, has their logs; spec.controller.durability keeps rows meanwhile",
            )


def _clock(picture: dict[str, Any]) -> Finding:
    ahead = time.time() - picture["time"]
    if abs(ahead) > _CLOCK_S:
        direction = "ahead of" if ahead > 0 else "behind"
        text = f"this machine is {abs(ahead):.0f} s {direction} the controller's; logs and traces will not fit together"
        return warn("clock", text, "run a time service (chrony, systemd-timesyncd) on both machines")
    return ok("clock", "as the controller's")


def inside(picture: Mapping[str, Any], *, reach: bool = False) -> Iterator[Finding]:
    """Storage units and rows, as the controller sees them; ``reach``: also whether this machine reaches the units."""
    yield from _units(picture, reach)
    lost = sum(item["lost"] for item in picture["partitions"])
    if lost:
        yield fail("rows", f"{lost} rows were lost with a storage unit", "clear them (tq clear) and put them again")


def _units(picture: Mapping[str, Any], reach: bool) -> Iterator[Finding]:
    units, expected = picture["units"], picture["expected_units"]
    connected = [unit for unit in units if unit["connected"] and not unit.get("on_device")]
    if len(connected) < expected:
        text = f"{len(connected)} of {expected} storage units are connected; puts fail without one"
        fix = "look at the logs of the others: tq status shows the processes here, kubectl get pods those of a cluster"
        yield (warn if connected else fail)("storage units", text, fix)
    unreachable = 0
    for unit in connected[:_MOST_UNITS]:
        if reach and unit["address"] and (reason := _refusal(unit["address"])):
            unreachable += 1
            fix = "open the port to this machine: clients move bytes to and from storage units themselves"
            yield fail("storage units", f"{unit['name']} at {unit['address']}: {reason}", fix)
        if unit["used"] > _FULL * unit["capacity"]:
            fix = "clear rows that were consumed, or raise spec.storage.capacity or replicas"
            yield warn("storage units", f"{unit['name']} is {unit['used'] / unit['capacity']:.0%} full", fix)
    if len(connected) >= expected and not unreachable:
        yield ok("storage units", f"{len(connected)} connected")


def _mooncake(backend: dict[str, Any]) -> Iterator[Finding]:
    master = str(backend.get("masterServerAddress") or "")
    if master:
        reason = _refusal(master)
        fix = "start the mooncake_master, or open its rpcPort to this machine"
        yield (
            fail("mooncake_master", f"{master}: {reason}", fix)
            if reason
            else ok("mooncake_master", f"answers at {master}")
        )
    metadata = str(backend.get("metadataServer") or "")
    if metadata.startswith("http"):
        yield _metadata_server(metadata)
    admin = str(backend.get("adminAddress") or "")
    if admin and not Admin(admin, timeout_s=_WAIT_S).ready():
        yield fail(
            "mooncake_master", f"its HTTP port {admin} does not say that it serves", "look at its log; tq status"
        )


def _metadata_server(address: str) -> Finding:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    fix = "start mooncake_master with its HTTP metadata server, or open httpMetadataPort to this machine"
    try:
        opener.open(f"{address}?key=tq-doctor", timeout=_WAIT_S).close()
    except urllib.error.HTTPError as error:
        error.close()  # an unknown key is refused: it answers
    except OSError as error:
        return fail("metadata server", f"{address}: {getattr(error, 'reason', error)}", fix)
    return ok("metadata server", f"answers at {address}")


def _refusal(address: str) -> str:
    """Return why a connection to ``host:port`` fails; empty if it succeeds."""
    try:
        with socket.create_connection(parse_address(address), timeout=_WAIT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)
    except ConfigError as error:
        return str(error)


def proxy(subject: Subject) -> Iterator[Finding]:
    """Mooncake asks its metadata server by HTTP and obeys proxy variables."""
    if not subject.uses_mooncake or not urllib.request.getproxies().get("http"):
        return
    address = "http://127.0.0.1/"
    if isinstance(subject.view, View):
        address = str(subject.view.settings.get("metadataServer") or address)
    host = urllib.parse.urlsplit(address).hostname or ""
    if urllib.request.proxy_bypass(host):
        yield ok("proxy", f"http_proxy is set; no_proxy excepts {host}")
    else:
        text = f"http_proxy is set, so that Mooncake asks the proxy for its metadata server at {host}"
        yield warn("proxy", text, f"export no_proxy={host},$no_proxy")
