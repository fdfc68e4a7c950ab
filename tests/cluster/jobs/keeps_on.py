"""Puts and gets a row again and again, whatever fails in between, until the row ``stop`` is there.

Prints a line of JSON for each outcome that differs from the one before: the time, and the error or "ok".
"""

from __future__ import annotations

import json
import time

import transfer_queue as tq
from transfer_queue.errors import TransferQueueError

PAUSE_S = 0.2


def outcome(number: int) -> str:
    try:
        tq.kv_put(f"{number}", "rows", {"x": number})
        return "ok" if list(tq.kv_batch_get(f"{number}", "rows")["x"]) == [number] else "another value"
    except TransferQueueError as error:
        return f"{type(error).__name__}: {error}"


def stopped() -> bool:
    try:
        return "stop" in tq.kv_list("control").get("control", {})
    except TransferQueueError:
        return False


def main() -> None:
    tq.init()
    number, last = 0, ""
    while not stopped():
        if (now := outcome(number)) != last:
            print(json.dumps({"time": time.time(), "row": number, "outcome": now}), flush=True)
        number, last = number + 1, now
        time.sleep(PAUSE_S)
    tq.close()


if __name__ == "__main__":
    main()
