"""The public surface of the releases 0.1.5 to 0.1.11 against the library that is here."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.compat.surface.compare import call_mismatch, differences, find, mismatch, recorded, unexplained
from tests.compat.surface.reasons import REASONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"

PROPOSED = {
    "kv_local_lock": "(keys, partition_id, timeout=None)",
    "kv_global_lock": "(keys, partition_id, timeout=None, lease_s=30)",
    "kv_update": "(key, partition_id, fields, values, parser)",
    "LockLostError": "RuntimeError",
    "dump_data_by_key": "(dump_dir, keys, partition_id)",
    "load_data_by_key": "(dump_dir)",
    "read_row_index": "(dump_dir)",
}
"""What has been proposed for 0.1.x and is in none of its releases."""


@pytest.mark.parametrize("name", PROPOSED)
def test_a_proposed_name_is_here_and_takes_the_proposed_call(name: str) -> None:
    assert mismatch(PROPOSED[name], find(f"transfer_queue.{name}")) == ""


def test_every_name_of_the_releases_is_here_or_has_a_reason() -> None:
    left, unused = unexplained(differences(recorded()), REASONS)
    assert (left, unused) == ([], set())


def test_the_page_gives_each_reason() -> None:
    page = " ".join(PAGE.read_text().replace("`", "").split())
    assert [reason for reason in REASONS.values() if reason not in page] == []


def test_a_call_that_cannot_be_made_any_more_is_a_difference() -> None:
    def ours(keys, partition_id, fields=None, *, layout=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    wrong = {
        text: call_mismatch(text, inspect.signature(ours))
        for text in ("(keys, partition_id)", "(partition_id, keys)", "(keys, partition_id, fields=())", "(keys)")
    } | {"(keys, *, mode)": call_mismatch("(keys, *, mode)", inspect.signature(ours))}
    assert wrong == {
        "(keys, partition_id)": "",
        "(partition_id, keys)": "partition_id is not argument 1",
        "(keys, partition_id, fields=())": "",
        "(keys)": "needs partition_id",
        "(keys, *, mode)": "has no mode",
    }
