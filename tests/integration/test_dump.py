"""Rows by key as files: dumped, read without a queue, put into the same queue or another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.stack import Stack, running_stack
from transfer_queue.checkpoint import dump
from transfer_queue.control.commands import Clear, Commit
from transfer_queue.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, KeyNotFoundError

KEYS = [f"key {number}" for number in range(600)]  # several windows


def fill(partition: str) -> None:
    ragged = [torch.arange(number % 5) for number in range(600)]
    fields = {
        "dense": torch.arange(1200.0).view(600, 2),
        "ragged": torch.nested.as_nested_tensor(ragged, layout=torch.jagged),
        "text": [f"text {number}" for number in range(600)],
    }
    tq.kv_batch_put(KEYS, partition, TensorDict(fields, [600]), [{"n": number} for number in range(600)])
    tq.kv_batch_put(KEYS[:500:3], partition, TensorDict({"reward": torch.arange(167)}, [167]))
    tq.kv_put("only a tag", partition, tag={"done": [1, 2]})


def row(key: str, partition: str) -> dict[str, Any]:
    found = tq.kv_batch_get(key, partition)
    return {name: value[0].tolist() if torch.is_tensor(value) else value.tolist() for name, value in found.items()}


@pytest.fixture
def dumped(queue: Stack, partition: str, tmp_path: Path) -> tuple[list[str], dict[str, Any]]:
    """The keys of the dump ``tmp_path / "rows"``, in its order, and what their rows had."""
    fill(partition)
    chosen = [*KEYS[::-2], "only a tag"]
    before = {key: row(key, partition) for key in chosen[:-1:30]}
    counts = tq.dump_data_by_key(tmp_path / "rows", chosen, partition)
    assert {name: counts[name] for name in ("keys", "rows_with_data", "shards")} == {
        "keys": 301,
        "rows_with_data": 300,
        "shards": 1,
    }
    return chosen, before


def test_rows_come_back_in_another_queue(
    dumped: tuple[list[str], dict[str, Any]], queue: Stack, partition: str, tmp_path: Path
) -> None:
    chosen, before = dumped
    tags = tq.kv_list(partition)[partition]
    tq.close()
    index = tq.read_row_index(tmp_path / "rows")
    assert (index["partition_id"], list(index["rows"])) == (partition, chosen)
    assert {name: sorted(about["fields"]) for name, about in index["rows"].items() if name in ("key 3", "key 1")} == {
        "key 3": ["dense", "ragged", "reward", "text"],
        "key 1": ["dense", "ragged", "text"],
    }
    assert index["rows"]["only a tag"]["fields"] == []
    with running_stack(units=3, capacity="16Mi") as other:
        tq.init({"controller": {"addresses": [other.address]}})
        assert tq.load_data_by_key(tmp_path / "rows")["keys"] == 301
        assert tq.kv_list(partition)[partition] == {key: tags[key] for key in chosen}
        assert {key: row(key, partition) for key in before} == before
        tq.close()


def test_a_load_leaves_everything_else_of_the_queue(
    dumped: tuple[list[str], dict[str, Any]], partition: str, tmp_path: Path
) -> None:
    _, before = dumped
    (key, there), *_ = before.items()
    tq.kv_put(key, partition, {"dense": torch.zeros(2), "later": torch.tensor(5)}, tag={"n": -1, "kept": True})
    tq.kv_put("key 0", partition, {"dense": torch.zeros(2)})
    tq.kv_clear("key 1", partition)
    tq.load_data_by_key(tmp_path / "rows")
    assert row(key, partition) == {**there, "later": 5}
    assert tq.kv_list(partition)[partition][key] == {"n": int(key.split()[1]), "kept": True}
    assert row("key 0", partition)["dense"] == [0, 0]
    assert row("key 1", partition)["text"] == ["text 1"]


def test_what_cannot_be_dumped_or_loaded_is_refused_and_changes_nothing(
    dumped: tuple[list[str], dict[str, Any]], partition: str, tmp_path: Path
) -> None:
    with pytest.raises(KeyNotFoundError, match="key 600"):
        tq.dump_data_by_key(tmp_path / "rows", ["key 1", "key 600"], partition)
    with pytest.raises(KeyNotFoundError, match="no partition 'nowhere'"):
        tq.dump_data_by_key(tmp_path / "new", "key 1", "nowhere")
    with pytest.raises(CheckpointNotFoundError):
        tq.load_data_by_key(tmp_path / "new")
    with pytest.raises(CheckpointError, match="load it with load_data_by_key"):
        tq.load_checkpoint(tmp_path / "rows")
    with pytest.raises(CheckpointError, match="checkpoint of rows by key, which would be lost"):
        tq.save_checkpoint(tmp_path / "rows")
    tq.save_checkpoint(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="checkpoint of a whole queue, which would be lost"):
        tq.dump_data_by_key(tmp_path / "whole", "key 1", partition)
    with pytest.raises(CheckpointError, match="load it with load_checkpoint"):
        tq.load_data_by_key(tmp_path / "whole")
    assert len(tq.read_row_index(tmp_path / "rows")["rows"]) == 301
    (blocks,) = tmp_path.glob("rows/data-*/blocks-00000")
    blocks.write_bytes(blocks.read_bytes()[:-1] + b"!")
    with pytest.raises(CorruptCheckpointError, match="blocks-00000 is damaged"):
        tq.load_data_by_key(tmp_path / "rows")


def test_a_dump_leaves_nothing_of_the_one_that_it_replaces(queue: Stack, partition: str, tmp_path: Path) -> None:
    for number in range(2):
        tq.kv_put("k", partition, {"x": torch.tensor([number])})
        tq.dump_data_by_key(tmp_path / "one", ["k"], partition)
    assert len(list((tmp_path / "one").glob("data-*"))) == 1


def test_a_row_that_is_replaced_while_it_is_dumped_is_dumped_whole(
    queue: Stack, partition: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tq.kv_put("k", partition, {"x": torch.tensor([1])}, tag={"n": 1})
    locate, replaced = dump._locate, []

    async def replace_after(client: Any, keys: list[str], partition: str) -> Any:
        batch = await locate(client, keys, partition)
        if not replaced:
            replaced.append(partition)
            await client.engine.request(Clear(partition, keys=keys), 20.0)
            await client.engine.put(None, Commit(partition, keys=keys, tags=[{"n": 2}]), timeout_s=20.0)
        return batch

    monkeypatch.setattr(dump, "_locate", replace_after)
    tq.dump_data_by_key(tmp_path / "one", ["k"], partition)
    about = tq.read_row_index(tmp_path / "one")["rows"]["k"]
    assert (about["tag"], about["fields"]) == ({"n": 2}, [])


def test_no_row_is_loaded_before_its_tag(
    dumped: tuple[list[str], dict[str, Any]], partition: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tq.kv_clear(dumped[0], partition)
    engine = type(tq.get_client().engine)
    put, bare = engine.put, []

    def watched(self: Any, block: Any, commit: Commit, **options: Any) -> Any:
        bare.extend(key for key, tag in zip(commit.keys or [], commit.tags or [{}] * 1000, strict=False) if not tag)
        return put(self, block, commit, **options)

    monkeypatch.setattr(engine, "put", watched)
    tq.load_data_by_key(tmp_path / "rows")
    assert bare == []
