"""What the environment says of a client's waits."""

from __future__ import annotations

import pytest

from transfer_queue.client.options import ClientOptions
from transfer_queue.config.attach import AttachConfig, ControllerAddresses
from transfer_queue.errors import ConfigError

ATTACH = AttachConfig(controller=ControllerAddresses(addresses=["127.0.0.1:1"]))


@pytest.mark.parametrize("text", ["soon", "nan", "-1"])
def test_a_wait_that_cannot_be_is_refused_by_its_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TQ_PUT_WAIT", text)
    with pytest.raises(ConfigError, match=f"TQ_PUT_WAIT: '{text}' is not a number of seconds from 0 on"):
        ClientOptions.of(ATTACH)


def test_a_wait_without_end_is_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_PUT_WAIT", "inf")
    assert ClientOptions.of(ATTACH).put_wait_s == 1e9
