"""The process that restores and saves a queue, while its settings and the queue change."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import yaml

import transfer_queue as tq
from tests.integration.queue_command import free_ports
from tests.waiting import wait_until
from transfer_queue.config.running import CheckpointReport, LastCheckpoint, read_report
from transfer_queue.launch.local import LocalStack, default_plan


def test_a_restore_waits_for_the_units_that_are_wanted_now_and_an_error_ends_with_a_queue_without_rows(
    tmp_path: Path,
) -> None:
    series, status, file = tmp_path / "series", tmp_path / "status.json", tmp_path / "checkpoint.yaml"
    before = LastCheckpoint("2026-01-01T00:00:00Z", 7, 4096, "/elsewhere", error="not saved: the disk is full")
    status.write_bytes(msgspec.json.encode(CheckpointReport(before)))
    port = free_ports(1)
    with LocalStack(default_plan(units=1, unit_capacity=16 << 20)).start() as stack:
        settings = {"attach": stack.attach_config.dump(), "restoreFrom": str(series), "units": 2, "schedule": "1s"}
        settings |= {"destination": str(series), "statusFile": str(status), "metricsPort": port}
        file.write_text(yaml.safe_dump(settings))
        tq.init({"controller": {"addresses": stack.controller_addresses}})
        try:
            tq.save_checkpoint(series / "20260101T000000Z")
        finally:
            tq.close()

        def missing() -> str:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz") as answer:
                    return str(answer.read())
            except urllib.error.HTTPError as error:
                return error.read().decode()
            except OSError:  # it starts
                return ""

        command = [sys.executable, "-m", "transfer_queue.checkpoint.saver", "--config", str(file), "--die-with-parent"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as saver:
            try:
                wait_until(lambda: "fewer than 2 storage units" in missing(), "it waits")
                file.write_text(yaml.safe_dump({**settings, "units": 1}))
                wait_until(lambda: (read_report(status) or CheckpointReport()).restored, "it is restored")

                def last() -> LastCheckpoint:
                    report = read_report(status)
                    return (report and report.last) or before

                wait_until(lambda: not last().error, "nothing is left to save")
                assert last() == msgspec.structs.replace(before, error="")
            finally:
                saver.terminate()
