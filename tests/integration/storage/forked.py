"""A plugin for runs of the conformance suite: the Python processes that it starts are forked (``tests.preloaded``)."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from tests import preloaded


@pytest.fixture(scope="session", autouse=True)
def forked() -> Iterator[None]:
    with preloaded.servers(), preloaded.spawns():
        yield


@pytest.fixture(autouse=True)
def forked_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    if hasattr(request.module, "subprocess"):
        with mock.patch.object(request.module, "subprocess", preloaded):
            yield
    else:
        yield
