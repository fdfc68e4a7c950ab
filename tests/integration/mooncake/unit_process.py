"""A storage unit's Mooncake store in a process of its own, driven by JSON lines.

``python -m tests.integration.mooncake.unit_process SETTINGS_JSON NAME CAPACITY`` takes [method, *arguments] and
answers ["answer", value]. It prints ["ready", attributes] when its segment is mounted, ["lost"] when it notices that
its blocks are gone, ["in doubt"] when some may be, and ["failed", text] if it cannot start.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from transfer_queue.errors import TransferQueueError
from transfer_queue.storage.base import StoreContext
from transfer_queue.storage.mooncake.unit import open_store


def say(*words: Any) -> None:
    print(json.dumps(words), flush=True)


async def main() -> None:
    context = StoreContext(
        name=sys.argv[2],
        capacity=int(sys.argv[3]),
        settings=json.loads(sys.argv[1]),
        directory="",
        log=lambda text: print(text, file=sys.stderr, flush=True),
        lost=lambda: say("lost"),
        in_doubt=lambda: say("in doubt"),
    )
    try:
        store = await open_store(context)
    except TransferQueueError as error:
        say("failed", str(error))
        return
    say("ready", store.attributes())
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        method, *arguments = json.loads(line)
        if method == "stats":
            stats = store.stats()
            say("answer", [stats.capacity, stats.used, stats.blocks])
        elif method == "registered":
            store.registered(*arguments)
            say("answer", None)
        elif method == "free":
            await store.free(*arguments)
            say("answer", None)
        elif method == "inventory":
            say("answer", await store.inventory())
    await store.close()


asyncio.run(main())
