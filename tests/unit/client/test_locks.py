"""Locks that are called and not entered."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

import transfer_queue as tq


@pytest.mark.parametrize(
    ("call", "usage"),
    [
        (tq.kv_global_lock, "with kv_global_lock"),
        (tq.async_kv_global_lock, "async with async_kv_global_lock"),
        (tq.kv_local_lock, "with kv_local_lock"),
        (tq.async_kv_local_lock, "async with async_kv_local_lock"),
    ],
)
def test_a_lock_that_is_not_entered_says_that_nothing_was_locked(call: Callable[..., Any], usage: str) -> None:
    with pytest.warns(UserWarning, match="nothing was locked") as said:
        call("a", "train")
    assert f"write {usage}(...):" in str(said[0].message)
    assert said[0].filename == __file__
    with pytest.raises(tq.InvalidInputError, match="timeout must be a number of seconds"):
        call("a", "train", timeout=-1)
    with pytest.raises(TypeError, match=r"lock\(\) missing a required argument: 'partition_id'"):
        call("a")


def test_a_lock_that_is_entered_warns_of_nothing_and_cannot_be_entered_again() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lock = tq.kv_local_lock("a", "train")
        with lock:
            pass
        with pytest.raises(tq.RequestError, match="was entered before"), lock:
            pass
        del lock
        with pytest.raises(tq.InvalidInputError), tq.kv_local_lock([], "train"):
            pass
