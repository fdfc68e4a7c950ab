"""Load a checkpoint and end by SIGKILL: ``python -m tests.integration.killed_load ADDRESS PLACE STEP``.

It is killed before the message STEP, from 0, of those by which the controllers take over the checkpoint together.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import transfer_queue as tq
from transfer_queue.client.session import ControllerSession
from transfer_queue.wire.messages import Adopt


def main(address: str, place: str, step: str) -> None:
    left = int(step)
    transfer = ControllerSession.transfer

    async def killed(session: ControllerSession, message: Any, *rest: Any) -> Any:
        nonlocal left
        if isinstance(message, Adopt) and message.step != "ask":
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        return await transfer(session, message, *rest)

    ControllerSession.transfer = killed  # type: ignore[method-assign]
    tq.init({"controller": {"addresses": [address]}})
    tq.load_checkpoint(place)


if __name__ == "__main__":
    main(*sys.argv[1:])
