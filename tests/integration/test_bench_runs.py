"""Short runs of what takes minutes at full length: the soak, and the control core at scale."""

from __future__ import annotations

from bench.scale import measure
from bench.soak import soak


def test_a_short_soak_finds_no_wrong_byte_and_nothing_that_grows() -> None:
    result = soak(20.0)
    assert result["faults"] == []
    assert result["done"]["puts"] > 0
    assert result["done"]["clears"] > 0


def test_a_step_of_thousands_of_virtual_clients_is_consumed_whole() -> None:
    result = measure(rows=8192, clients=4096, trainers=64, batch=32, units=16)
    assert result["parked_at_most"] == 4 * 64
    assert result["core_bytes_per_row"] < 2000
