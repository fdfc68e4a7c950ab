"""The calls of Relax, a fork of 0.1.7: streaming loaders, balanced ranks, tags by metadata, partition lists, and
micro-batches by tokens of a partition whose size nobody knows beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.stack import Stack, running_stack
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset
from transfer_queue.launch.conf import sampler_choice
from transfer_queue.sampler.seqlen_balanced_sampler import get_seqlen_balanced_partitions

LENGTHS = [8, 1, 2, 7, 3, 6, 5, 4]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    sampler = {"name": "SeqlenBalancedSampler", "args": {"n_samples_per_prompt": 2, "dp_size": 2}}
    with running_stack(units=2, capacity="64Mi", sampler=sampler, pollingMode=True) as running:
        yield running


def put(partition: str) -> tq.BatchMeta:
    """Rows with their lengths as tags, as producers of Relax leave them."""
    client = tq.get_client()
    ids = torch.nested.as_nested_tensor([torch.full((n,), n) for n in LENGTHS], layout=torch.jagged)
    meta = client.put(TensorDict({"tokens": ids, "reward": torch.arange(8.0)}, [8]), partition_id=partition)
    meta.update_custom_meta([{"total_lengths": length} for length in LENGTHS])
    client.set_custom_meta(meta)
    return meta


def test_ranks_get_balanced_whole_groups_and_repeats_are_identical(queue: Stack, partition: str) -> None:
    rows = put(partition).global_indexes
    client = tq.get_client()
    metas = {}
    for rank in (0, 1):
        config = {"dp_rank": rank, "batch_index": 0, "task_name": "train", "partition_id": partition}
        for _ in range(2):
            meta = client.get_meta(["tokens"], 4, partition, task_name="train", sampling_config=config)
            assert metas.setdefault(rank, meta).global_indexes == meta.global_indexes
    assert sorted(metas[0].global_indexes + metas[1].global_indexes) == rows
    sums = [sum(tag["total_lengths"] for tag in metas[rank].custom_meta) for rank in (0, 1)]
    assert sums == [18, 18]
    for meta in metas.values():
        position = [rows.index(index) for index in meta.global_indexes]
        assert [number // 2 for number in position][::2] == [number // 2 for number in position][1::2]
        tokens = client.get_data(meta)["tokens"]
        assert tokens.is_nested
        assert tokens.offsets().diff().tolist() == [LENGTHS[number] for number in position]


def test_a_streaming_loader_of_each_rank_sees_its_share_once(queue: Stack, partition: str) -> None:
    put(partition)

    def rank_of(rank: int) -> list[float]:
        dataset = StreamingDataset(
            config={"controller": {"addresses": [queue.address]}, "security": {"allowPickle": True}},
            batch_size=4,
            micro_batch_size=2,
            data_fields=["tokens", "reward"],
            partition_id=partition,
            task_name="actor",
            dp_rank=rank,
            should_check_consumption_status=True,
        )
        loader = StreamingDataLoader(dataset, num_workers=0)
        rewards = []
        pieces = list(loader)
        assert [len(meta) for _, meta in pieces] == [2, 2]
        for td, meta in pieces:
            assert td["tokens"].offsets().diff().tolist() == [tag["total_lengths"] for tag in meta.custom_meta]
            rewards += td["reward"].tolist()
        assert len(loader.get_buffer()) == 1
        loader.reset()
        assert [reward for td, _ in loader for reward in td["reward"].tolist()] == rewards  # a second epoch of them
        dataset.close()
        return rewards

    with ThreadPoolExecutor(2) as pool:  # every rank must ask
        shares = list(pool.map(rank_of, range(2)))
    assert [len(share) for share in shares] == [4, 4]
    assert sorted(shares[0] + shares[1]) == list(range(8))


def test_partitions_are_listed_in_order_and_go_with_their_clearing(queue: Stack, partition: str) -> None:
    client = tq.get_client()
    names = [f"{partition}-{number}" for number in range(3)]
    for name in names:
        client.put(TensorDict({"x": torch.ones(2, 3)}, [2]), partition_id=name)
    assert [name for name in client.get_partition_list() if name in names] == names
    client.clear_partition(names[1])
    assert [name for name in client.get_partition_list() if name in names] == [names[0], names[2]]
    index, status = client.get_production_status(["x"], names[2])
    assert index is not None
    assert status is not None
    assert (tuple(index.shape), tuple(status.shape), bool(status.all())) == ((2,), (2, 1), True)


def test_tags_by_metadata_merge_over_several_partitions(queue: Stack, partition: str) -> None:
    client = tq.get_client()
    names = [f"{partition}-{number}" for number in range(2)]
    metas = [client.put(TensorDict({"x": torch.ones(2)}, [2]), partition_id=name) for name in names]
    both = tq.BatchMeta.concat(metas)
    both.update_custom_meta([{"n": number} for number in range(4)])
    client.set_custom_meta(both)
    both.update_custom_meta([{"m": 1}] * 4)
    client.set_custom_meta(both)
    for part, numbers in zip(names, ([0, 1], [2, 3]), strict=True):
        stored = client.get_meta(["x"], 0, part, mode="force_fetch")
        assert stored.custom_meta == [{"n": number, "m": 1} for number in numbers]
    assert [part.partition_ids[0] for part in both.chunk_by_partition()] == names


def test_too_few_rows_are_an_empty_batch_at_once(queue: Stack, partition: str) -> None:
    config = {"dp_rank": 0, "batch_index": 0}
    meta = tq.get_client().get_meta(["x"], 2, partition, task_name="t", sampling_config=config)
    assert (meta.size, meta.is_ready) == (0, False)


def test_lengths_are_divided_evenly() -> None:
    parts = get_seqlen_balanced_partitions(LENGTHS, 2, equal_size=True)
    assert sorted(position for part in parts for position in part) == list(range(8))
    assert [sum(LENGTHS[position] for position in part) for part in parts] == [18, 18]


@pytest.fixture
def by_tokens() -> Iterator[tq.TransferQueueClient]:
    sampler = tq.StreamingTokenBudgetSampler(n_samples_per_prompt=2)  # type: ignore[attr-defined]
    with running_stack(units=1, sampler=sampler_choice(sampler).model_dump(), pollingMode=True) as running:
        client = tq.TransferQueueClient("relax", running.address)
        yield client
        client.close()


def train_batch(lengths: list[int]) -> TensorDict:
    tokens = torch.nested.as_nested_tensor([torch.full((n,), n) for n in lengths], layout=torch.jagged)
    return TensorDict({"tokens": tokens}, [len(lengths)])


def test_a_stream_of_token_budgets_is_drained_once_its_last_put_says_so(by_tokens: tq.TransferQueueClient) -> None:
    """``fully_async`` with dynamic batches: advantages need whole groups, the trainer's ranks go by tokens."""
    client, name, ranks = by_tokens, "train_0", 2

    async def produce(lengths: list[int], is_last: bool) -> None:
        tags = [{"total_lengths": length} for length in lengths]
        meta = await client.async_put(data=train_batch(lengths), partition_id=name, custom_meta=tags, is_last=is_last)
        assert meta.custom_meta == tags

    def micro_batch(rank: int, number: int) -> tq.BatchMeta:
        config = {"dp_rank": rank, "dp_size": ranks, "task_name": "actor_train", "batch_index": number}
        return client.get_meta(
            data_fields=["tokens"],
            token_budget=10,
            partition_id=name,
            sampling_config={**config, "partition_id": name, "allow_underfill": True},
            task_name="actor_train",
        )

    assert not asyncio.run(client.async_check_production_completed(name))
    assert micro_batch(0, 0).size == 0
    asyncio.run(produce([6, 4, 5, 4], is_last=False))
    first, second = [[micro_batch(rank, 0) for rank in range(ranks)] for _ in range(2)]  # stages of a pipeline
    assert [meta.global_indexes for meta in first] == [meta.global_indexes for meta in second]
    assert [sum(tag["total_lengths"] for tag in meta.custom_meta) for meta in first] == [10, 9]
    asyncio.run(produce([3, 2, 7, 1, 9, 1], is_last=True))
    assert asyncio.run(client.async_check_production_completed(name))
    assert not asyncio.run(client.async_check_stream_drained("actor_train", name))
    seen = [index for meta in first for index in meta.global_indexes]
    for number in range(1, 6):
        for rank in range(ranks):
            meta = micro_batch(rank, number)
            lengths = [tag["total_lengths"] for tag in meta.custom_meta]
            assert sum(lengths) <= 10
            assert not lengths or client.get_data(meta)["tokens"].offsets().diff().tolist() == lengths
            seen += meta.global_indexes
    assert len(seen) == len(set(seen)) == 10
    assert asyncio.run(client.async_check_stream_drained("actor_train", name))

    advantages = client.get_meta(["tokens"], 4, name, task_name="compute_advantages", sampling_config={"dp_rank": 0})
    assert advantages.global_indexes == sorted(seen)[:4]
    assert not client.check_stream_drained("compute_advantages", name)
    client.clear_partition(name)
    assert not client.check_production_completed(name)
    client.put(train_batch([1]), partition_id=name)
    assert not client.check_production_completed(name)  # what was said went with the partition


def test_rows_may_be_reserved_as_the_last_ones(by_tokens: tq.TransferQueueClient) -> None:
    meta = by_tokens.get_meta([], 2, "train_1", mode="insert", is_last=True)
    assert not by_tokens.check_production_completed("train_1")  # they have no data yet
    tags = [{"total_lengths": 1}, {"total_lengths": 2}]
    assert by_tokens.put(train_batch([1, 2]), meta, custom_meta=tags).custom_meta == tags
    assert by_tokens.check_production_completed("train_1")
    with pytest.raises(ValueError, match=r"is_last.*new rows"):
        by_tokens.put(train_batch([1, 2]), meta, is_last=True)
    with pytest.raises(ValueError, match=r"is_last.*new rows"):
        by_tokens.get_meta(["tokens"], 1, "train_1", task_name="t", is_last=True)
    with pytest.raises(ValueError, match=r"3 custom_meta.*does not match 2 rows"):
        by_tokens.put(train_batch([1, 2]), partition_id="train_2", custom_meta=[{}] * 3)
    with pytest.raises(TypeError, match="batch_size"):
        by_tokens.get_meta(["tokens"], partition_id="train_1", task_name="t")
    assert by_tokens.get_partition_list() == ["train_1"]
