"""A controller and its journal."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from transfer_queue.config.document import validate_document
from transfer_queue.config.processes import ControllerConfig
from transfer_queue.control.core import ControlCore
from transfer_queue.runtime import recovery
from transfer_queue.runtime.controller import Controller
from transfer_queue.runtime.entries import RunBegan


def test_what_waits_for_the_disk_is_acknowledged_while_a_snapshot_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = threading.Event()

    def encode() -> bytes:
        encoded.wait(60)
        return b""

    monkeypatch.setattr(recovery, "cut", lambda state, large: encode)
    monkeypatch.setattr(recovery.attach_journal, "__kwdefaults__", {"compact_bytes": 1})

    async def work() -> None:
        config = {"name": "q", "durability": "node", "journal": str(tmp_path)}
        controller = Controller(
            validate_document(ControllerConfig, config, "test"), ControlCore(journal=True), asyncio.get_running_loop()
        )
        journal = recovery.JournalRecovery(controller, asyncio.Event())
        for _ in range(2):  # a snapshot begins with the first
            kept = asyncio.Event()
            controller.record(RunBegan("run"))
            assert controller.journal is not None
            controller.journal.after(kept.set)
            await asyncio.wait_for(kept.wait(), 20)
        assert controller.journal is not None
        assert controller.journal._snapshotting
        encoded.set()
        await controller.close()
        journal.close()

    try:
        asyncio.run(work())
    finally:
        encoded.set()
