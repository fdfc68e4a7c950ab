"""Arguments and results of the checks of ``tq doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transfer_queue.cli.connection import ControllerConnection, find_queue
from transfer_queue.config import resource
from transfer_queue.config.attach import AttachConfig
from transfer_queue.config.resource import TransferQueue
from transfer_queue.errors import ConfigError, TransferQueueError
from transfer_queue.launch.plan import LocalPlan, plan_local
from transfer_queue.launch.ports import with_free_ports

__all__ = ["Finding", "Subject", "View", "fail", "ok", "warn"]


class Finding(NamedTuple):
    """``fix``: what to do about it; empty if it is well."""

    check: str
    state: Literal["ok", "warn", "fail"]
    text: str
    fix: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def warn(check: str, text: str, fix: str) -> Finding:
    return Finding(check, "warn", text, fix)


def fail(check: str, text: str, fix: str) -> Finding:
    return Finding(check, "fail", text, fix)


class View(NamedTuple):
    """Answer of a controller."""

    address: str
    backend: str
    settings: dict[str, Any]
    picture: dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """Subject of the checks. ``root`` holds sys, proc and dev."""

    file: Path | None
    root: Path
    shared_memory: Path
    queue: str | None
    controller: str | None

    @cached_property
    def wanted(self) -> TransferQueue | None:
        """The resource, if there is one and it is right."""
        try:
            return None if self.file is None else resource.load(self.file)
        except TransferQueueError:
            return None  # the check of the file says why

    @cached_property
    def plan(self) -> LocalPlan | None:
        """The processes of the resource on this machine, if it can run here."""
        try:
            return None if self.wanted is None else plan_local(with_free_ports(self.wanted))
        except TransferQueueError:
            return None

    @cached_property
    def attach(self) -> AttachConfig | None:
        """The queue that is meant, if one is."""
        try:
            return find_queue(self.queue, self.controller)
        except ConfigError:
            return None

    @cached_property
    def view(self) -> View | TransferQueueError | None:
        """Answer of the controller; the error if it does not answer; None if there is no queue to check."""
        if self.attach is None:
            return None
        try:
            with ControllerConnection(self.attach, timeout_s=5.0) as link:
                welcome = link.welcome
                address = ", ".join(self.attach.controller.addresses)
                return View(address, welcome.backend, welcome.settings, link.look())
        except TransferQueueError as error:
            return error

    @property
    def uses_mooncake(self) -> bool:
        planned = self.wanted is not None and self.wanted.spec.backend.kind == "mooncake"
        return planned or (isinstance(self.view, View) and self.view.backend == "mooncake")
