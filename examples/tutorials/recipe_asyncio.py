"""Recipe: 64 agents as asyncio tasks of one process.

Every call has an `async_` twin, so that tasks wait for each other's rows and for their model in one event loop.
"""

# %% The agents and their consumer
# Each task writes its prompt, waits for its model, and writes the answer to the same row. The consumer gets rows as
# soon as both are there, whichever task is first.
import asyncio
import random

import torch

import transfer_queue as tq

AGENTS, BATCH = 64, 16


async def agent(number: int) -> None:
    key = f"agent-{number}"
    await tq.async_kv_put(key, "turns", {"prompt": f"what is {number} + 1?"}, tag={"agent": number})
    await asyncio.sleep(random.random() * 0.1)  # the model
    await tq.async_kv_put(key, "turns", {"answer": torch.tensor(number + 1)})


async def consume() -> int:
    client, total = tq.get_client(), 0
    for _ in range(AGENTS // BATCH):
        meta = await client.async_get_meta(["prompt", "answer"], BATCH, "turns", task_name="check", timeout=60.0)
        batch = await client.async_get_data(meta)
        total += int(batch["answer"].sum())
    return total


# %% The program
async def run() -> None:
    consumer = asyncio.create_task(consume())
    await asyncio.gather(*(agent(number) for number in range(AGENTS)))
    print(await consumer)  # 2080


def main() -> None:
    tq.init()
    asyncio.run(run())
    tq.close()


if __name__ == "__main__":
    main()
