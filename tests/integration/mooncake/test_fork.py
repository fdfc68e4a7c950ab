"""The engine does not survive a fork."""

from __future__ import annotations

import pytest

from tests.integration.mooncake.conftest import settings_of
from tests.integration.test_client_process import in_forked_child
from transfer_queue.errors import StartError
from transfer_queue.storage.mooncake.master import MasterEndpoints
from transfer_queue.storage.mooncake.settings import parse_settings
from transfer_queue.storage.mooncake.store import open_store


def test_a_forked_child_of_a_process_with_an_engine_is_told_how_to_start_workers(master: MasterEndpoints) -> None:
    settings = parse_settings(settings_of(master))
    store = open_store(settings, 0)

    def child() -> None:
        with pytest.raises(StartError, match="start worker processes by spawn or forkserver"):
            open_store(settings, 0)

    try:
        assert in_forked_child(child) == 0
    finally:
        store.close()
