"""Recipe: an agent that talks in turns, steered by tags.

A conversation is a row. Its tag says whose turn it is, so that the agent and the environment find their work without
reading data; the transcript grows by upserts. Finished conversations are taken by the trainer, best first.
"""

# %% Conversations
# `PrioritySampler` gives the trainer those of the highest tag `priority` first.
import random
from typing import Any

import transfer_queue as tq

tq.init({"controller": {"sampler": tq.PrioritySampler()}})
secret = {f"game {number}": random.Random(number).randint(1, 100) for number in range(6)}
for key in secret:
    tq.kv_put(
        key, "games", {"transcript": ["guess a number from 1 to 100"]}, tag={"turn": "agent", "low": 1, "high": 100}
    )


# %% The two sides
# Both look for their turn in the tags, read the rows they need, and write what they add.
def whose(turn: str) -> dict[str, dict[str, Any]]:
    return {key: tag for key, tag in tq.kv_list("games")["games"].items() if tag["turn"] == turn}


def read(key: str) -> list[str]:
    return next(iter(tq.kv_batch_get(key, "games", "transcript")["transcript"]))


def say(key: str, text: str, fields: dict[str, Any] | None = None, **tag: object) -> None:
    tq.kv_put(key, "games", {"transcript": [*read(key), text], **(fields or {})}, tag=tag)


def agent() -> None:
    for key, tag in whose("agent").items():
        guess = (tag["low"] + tag["high"]) // 2
        say(key, str(guess), turn="environment", guess=guess)


def environment() -> None:
    for key, tag in whose("environment").items():
        guess = tag["guess"]
        if guess == secret[key]:
            turns = len(read(key)) // 2
            say(key, "right", {"turns": turns}, turn="nobody", priority=-turns)
        elif guess < secret[key]:
            say(key, "higher", turn="agent", low=guess + 1)
        else:
            say(key, "lower", turn="agent", high=guess - 1)


while whose("agent"):
    agent()
    environment()

# %% The trainer
# The field `turns` is written with the end of a game, so that a fetch that asks for it gets finished games only.
client = tq.get_client()
meta = client.get_meta(["transcript", "turns"], batch_size=3, partition_id="games", task_name="train")
games = client.get_data(meta)
for turns, transcript in zip(list(games["turns"]), list(games["transcript"]), strict=True):
    print(turns, " ".join(transcript[1:]))
best = sorted(-tag["priority"] for tag in tq.kv_list("games")["games"].values())[:3]
assert list(games["turns"]) == best
tq.close()
