"""``tq doctor``: problems of this machine and queue, each with a fix. The checks change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from transfer_queue.cli import doctor_machine, doctor_queue
from transfer_queue.cli.findings import Finding, Subject, fail
from transfer_queue.cli.output import line
from transfer_queue.errors import TransferQueueError

__all__ = ["Finding", "Subject", "draw_findings", "examine"]


class _Check(NamedTuple):
    name: str
    run: Callable[[Subject], Iterator[Finding]]


_CHECKS = (
    _Check("python", doctor_machine.python),
    _Check("packages", doctor_machine.packages),
    _Check("settings", doctor_queue.settings),
    _Check("resource", doctor_queue.resource_file),
    _Check("mooncake", doctor_machine.mooncake),
    _Check("ports", doctor_machine.ports),
    _Check("shared memory", doctor_machine.shared_memory),
    _Check("memory", doctor_machine.memory),
    _Check("limits", doctor_machine.limits),
    _Check("state folder", doctor_machine.state_folder),
    _Check("rdma", doctor_machine.rdma),
    _Check("controller", doctor_queue.controller),
    _Check("restarts", doctor_queue.restarts),
    _Check("proxy", doctor_queue.proxy),
)


def examine(subject: Subject) -> list[Finding]:
    """All findings, in the order of the checks."""
    findings: list[Finding] = []
    for check in _CHECKS:
        try:
            findings += check.run(subject)
        except TransferQueueError as error:  # of a check that met what another one tells with its fix, or a new fault
            findings.append(fail(check.name, str(error), "fix what the message names and run tq doctor again"))
    return findings


def draw_findings(findings: Sequence[Finding]) -> list[Any]:
    """A line each, the fix under what is not well, and a count."""
    colors = {"ok": "green", "warn": "yellow", "fail": "red"}
    lines: list[Any] = []
    for finding in findings:
        lines.append(Text(f"{finding.state:<5}", colors[finding.state]) + line(f"{finding.check}: {finding.text}"))
        if finding.fix:
            lines.append(line(f"      fix: {finding.fix}"))
    counts = {state: sum(finding.state == state for finding in findings) for state in colors}
    lines.append(Text(f"{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failures", "bold"))
    return lines
