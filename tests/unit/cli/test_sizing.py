"""The sizing calculator against sums done by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.cli.sizing import Job, parse_tokens, size
from transfer_queue.errors import ConfigError


def test_a_job_of_1024_gpus() -> None:
    found = size(Job(gpus=1024, tokens=32768, samples=8192, bytes_per_token=32, steps_in_flight=2))
    assert found.nodes == 128
    assert found.sample_bytes == 2**20
    assert found.step_bytes == 8 * 2**30
    assert found.stored_bytes == pytest.approx(1.3 * 16 * 2**30, rel=1e-6)
    assert (found.units, found.unit_bytes) == (21, 2**30)
    assert found.transfer_s == pytest.approx(2 * 8 * 2**30 / (21 * 25e9 * 0.7))


def test_a_laptop_gets_one_unit() -> None:
    found = size(Job(gpus=1, tokens=512, samples=8))
    assert (found.nodes, found.units, found.unit_bytes) == (1, 1, 2**30)


@given(st.integers(1, 4096), st.integers(1, 2**20), st.integers(1, 10**6), st.integers(1, 8))
def test_what_is_stored_fits_and_more_work_never_needs_less(gpus: int, tokens: int, samples: int, steps: int) -> None:
    found = size(Job(gpus=gpus, tokens=tokens, samples=samples, steps_in_flight=steps))
    more = size(Job(gpus=gpus, tokens=tokens, samples=samples + 1, steps_in_flight=steps))
    assert found.units * found.unit_bytes >= found.stored_bytes >= found.step_bytes * steps
    assert 1 <= found.units <= found.nodes
    assert more.units * more.unit_bytes >= found.stored_bytes


@pytest.mark.parametrize(("text", "tokens"), [("4096", 4096), ("32k", 32768), ("1M", 2**20)])
def test_tokens_may_have_a_unit(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "k", "-1", "1.5k", "32 kb"])
def test_other_words_for_tokens_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--seq"):
        parse_tokens(text)
