"""BatchMeta, KVBatchMeta and the sample classes of 0.1.5: what user code relies on."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from transfer_queue.control.schema import FieldSchema
from transfer_queue.errors import InvalidTypeError
from transfer_queue.metadata import (
    BatchMeta,
    FieldMeta,
    KVBatchMeta,
    ProductionStatus,
    SampleMeta,
    describe_fields,
    extract_field_schema,
)

DENSE = {"dtype": torch.float32, "shape": (3,), "is_nested": False, "is_non_tensor": False}
NESTED = {"dtype": torch.int64, "shape": None, "is_nested": True, "is_non_tensor": False}


def meta(n: int = 4, *, partition: str = "p", **options: Any) -> BatchMeta:
    schema = {"x": DENSE, "ids": {**NESTED, "per_sample_shapes": [(i + 1,) for i in range(n)]}}
    tags = [{"tag": i} for i in range(n)]
    options = {"field_schema": schema, "custom_meta": tags, "production_status": [1] * n, **options}
    return BatchMeta(list(range(n)), [partition] * n, **options)


# ------------------------------------------------------------------------------------------------------- KVBatchMeta


def kv(*keys: str, **options: Any) -> KVBatchMeta:
    options = {"partition_id": "p", "fields": ["x"], **options}
    return KVBatchMeta(keys=list(keys), tags=[{"of": key} for key in keys], **options)


def test_kv_meta_defaults_are_empty_and_equality_holds() -> None:
    empty = KVBatchMeta()
    assert (empty.keys, empty.tags, empty.partition_id, empty.fields, empty.extra_info) == ([], [], None, None, {})
    assert len(empty) == empty.size == 0
    assert empty == KVBatchMeta()
    assert kv("a") == kv("a") != kv("b")


def test_kv_meta_copies_tags_and_extra_info_deeply() -> None:
    tags, info = [{"deep": [1]}], {"deep": [1]}
    made = KVBatchMeta(["a"], tags, extra_info=info)
    tags[0]["deep"].append(2)
    info["deep"].append(2)
    assert (made.tags, made.extra_info) == ([{"deep": [1]}], {"deep": [1]})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keys": ["a"]}, "keys and tags must have same length"),
        ({"keys": ["a", "a"], "tags": [{}, {}]}, "Got duplicated keys"),
        ({"fields": ["x", "x"]}, "Got duplicated fields"),
    ],
)
def test_kv_meta_refuses_inconsistent_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        KVBatchMeta(**options)


def test_kv_select_keys_follows_the_given_order() -> None:
    selected = kv("a", "b", "c").select_keys(["c", "a"])
    assert selected == kv("c", "a")
    with pytest.raises(ValueError, match="Contain duplicate keys"):
        kv("a").select_keys(["a", "a"])
    with pytest.raises(RuntimeError, match="not found in current batch"):
        kv("a").select_keys(["z"])


def test_kv_reorder_is_in_place() -> None:
    made = kv("a", "b", "c")
    assert made.reorder([2, 0, 1]) is None
    assert made == kv("c", "a", "b")
    with pytest.raises(ValueError, match="does not match"):
        made.reorder([0])
    with pytest.raises(ValueError, match="Contain duplicate indexes"):
        made.reorder([0, 0, 1])


def test_kv_chunks_are_near_equal_with_larger_ones_first() -> None:
    assert [len(part) for part in kv(*"abcde").chunk(3)] == [2, 2, 1]
    assert [part.keys for part in kv("a").chunk(3)] == [["a"], [], []]
    assert kv(*"abc").chunk(2)[1] == kv("c")


def test_kv_concat_joins_and_skips_empty_parts() -> None:
    parts = [KVBatchMeta(), kv("a", extra_info={"one": 1}), kv("b", fields=None, extra_info={"two": 2})]
    assert KVBatchMeta.concat(parts) == kv("a", "b", extra_info={"one": 1, "two": 2})
    assert KVBatchMeta.concat([]) == KVBatchMeta()


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (kv("b", partition_id="q"), "Partition do not match"),
        (kv("b", fields=["y"]), "Field names do not match"),
        (kv("a"), "duplicated keys"),
        (kv("b", extra_info={"k": 2}), "conflicting"),
    ],
)
def test_kv_concat_refuses_what_does_not_fit(other: KVBatchMeta, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        KVBatchMeta.concat([kv("a", extra_info={"k": 1}), other])


# --------------------------------------------------------------------------------------------------------- BatchMeta


def test_batch_meta_without_arguments_is_empty() -> None:
    for empty in (BatchMeta(), BatchMeta.empty(), BatchMeta.concat([])):
        assert len(empty) == empty.size == 0
        assert empty.field_names == []
        assert not empty.is_ready
    assert BatchMeta.empty({"a": 1}).extra_info == {"a": 1}


def test_batch_meta_is_slotted_identity_compared_and_picklable() -> None:
    made = meta()
    with pytest.raises(AttributeError):
        made.unknown = 1  # type: ignore[attr-defined]
    assert made != meta()
    assert made == made
    other = pickle.loads(pickle.dumps(made))
    assert other.global_indexes == made.global_indexes
    assert other.get_shapes("ids") == made.get_shapes("ids")
    other.production_status[:] = 0
    assert not other.is_ready
    assert made.is_ready


def test_production_status_is_int8_zero_by_default_and_writable_whatever_it_came_from() -> None:
    made = BatchMeta([5, 6], ["p", "p"])
    assert (made.production_status.dtype, made.production_status.tolist()) == (np.int8, [0, 0])
    received = BatchMeta([5, 6], ["p", "p"], production_status=np.frombuffer(b"\1\1", np.int8))
    received.production_status[0] = 0
    assert not received.is_ready


@pytest.mark.parametrize(
    "options",
    [
        {"partition_ids": ["p"]},
        {"production_status": [1]},
        {"production_status": [[1, 1]]},
        {"custom_meta": [{}]},
        {"_custom_backend_meta": [{}] * 3},
        {"field_schema": {"x": {**NESTED, "per_sample_shapes": [(1,)]}}},
    ],
)
def test_length_mismatches_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="2 global_indexes"):
        BatchMeta([0, 1], **{"partition_ids": ["p", "p"], **options})


def test_field_names_are_sorted_and_dtypes_and_shapes_come_per_row() -> None:
    made = meta(2)
    assert made.field_names == ["ids", "x"]
    assert made.get_dtypes("x") == [torch.float32] * 2
    assert made.get_shapes("x") == [(3,), (3,)]
    assert made.get_shapes("ids") == [(1,), (2,)]
    for getter in (made.get_dtypes, made.get_shapes):
        with pytest.raises(KeyError, match="'y' is not in this batch"):
            getter("y")


def test_samples_show_rows_read_only() -> None:
    sample = meta(3).samples[-1]
    assert (sample.global_index, sample.partition_id, sample.production_status) == (2, "p", 1)
    assert sample.fields["ids"].shape == (3,)
    assert sample.fields["x"].shape == (3,)
    assert dict(sample.fields["ids"]).keys() == {"dtype", "shape", "is_nested", "is_non_tensor"}
    assert sample.fields["ids"]["shape"] == (3,)
    assert sample.fields["x"] == FieldMeta("x", sample.fields["x"]["dtype"], (3,), ProductionStatus(1))
    with pytest.raises(TypeError):
        sample.custom_meta["tag"] = 1  # type: ignore[index]
    assert [row.global_index for row in meta(3).samples] == [0, 1, 2]
    assert [row.global_index for row in meta(3).samples[1:]] == [1, 2]


def test_indexing_gives_batches() -> None:
    made = meta(4)
    assert made[-1].global_indexes == [3]
    assert made[np.int64(1)].get_shapes("ids") == [(2,)]
    assert made[1:3].global_indexes == [1, 2]
    assert made[::-2].get_shapes("ids") == [(4,), (2,)]
    for index in (4, -5):
        with pytest.raises(IndexError, match="out of range"):
            made[index]
    with pytest.raises(TypeError):
        made[[0, 1]]  # type: ignore[call-overload]


def test_parts_do_not_share_tags_or_status_with_the_whole() -> None:
    made = meta(2)
    part = made[0:1]
    part.custom_meta[0]["new"] = 1
    part.production_status[0] = 0
    part.extra_info["new"] = 1
    assert (made.custom_meta[0], made.is_ready, made.extra_info) == ({"tag": 0}, True, {})


def test_extra_info_is_a_batch_level_dict() -> None:
    info: dict[str, Any] = {}
    made = BatchMeta(extra_info=info)
    made.set_extra_info("a", [1])
    assert info == {}
    made.update_extra_info(info_dict={"b": 2})
    assert (made.get_extra_info("a"), made.get_extra_info("z", 9), made.has_extra_info("b")) == ([1], 9, True)
    made.get_all_extra_info()["a"].append(2)
    assert made.get_extra_info("a") == [1]
    assert (made.remove_extra_info("b"), made.remove_extra_info("b")) == (2, None)
    made.clear_extra_info()
    assert made.extra_info == {}


def test_a_batch_that_comes_from_another_process_can_be_written_to() -> None:
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(meta(2), protocol=5, buffer_callback=buffers.append)
    found = pickle.loads(sent, buffers=[bytes(buffer.raw()) for buffer in buffers])  # read-only, as from Ray
    found.production_status[0] = 0
    assert (found.production_status.tolist(), found.custom_meta) == ([0, 1], meta(2).custom_meta)


def test_custom_meta_merges_per_row() -> None:
    made = meta(2)
    made.update_custom_meta([{"new": 1}, None])
    made.update_custom_meta(None)
    assert made.custom_meta == [{"tag": 0, "new": 1}, {"tag": 1}]
    made.get_all_custom_meta()[0]["tag"] = 9
    assert made.custom_meta[0]["tag"] == 0
    with pytest.raises(ValueError, match="1 entries for 2 rows"):
        made.update_custom_meta([{}])
    made.clear_custom_meta()
    assert made.custom_meta == [{}, {}]


def test_add_fields_changes_the_batch_and_marks_it_ready() -> None:
    made = BatchMeta([0, 1], ["p", "p"])
    assert made.add_fields(TensorDict({}, [0])) is made
    assert not made.is_ready
    made.add_fields(TensorDict({"a": torch.zeros(2)}, [2]), set_all_ready=False)
    assert not made.is_ready
    assert made.add_fields(TensorDict({"b": torch.zeros(2, 3), "s": ["x", "y"]}, [2])) is made
    assert made.is_ready
    assert made.field_names == ["a", "b", "s"]
    assert (made.field_schema["a"]["shape"], made.field_schema["b"]["shape"]) == ((1,), (3,))
    with pytest.raises(ValueError, match="does not match"):
        made.add_fields(TensorDict({"c": torch.zeros(3)}, [3]))


def test_select_samples_takes_positions_and_repeats() -> None:
    picked = meta(3).select_samples([2, 0, 2])
    assert picked.global_indexes == [2, 0, 2]
    assert picked.get_shapes("ids") == [(3,), (1,), (3,)]
    for positions in ([3], [-1]):
        with pytest.raises(ValueError, match="within 0 to 2"):
            meta(3).select_samples(positions)


def test_select_fields_ignores_unknown_names() -> None:
    assert meta().select_fields(["ids", "unknown"]).field_names == ["ids"]


def test_copy_is_deep() -> None:
    made = meta(1)
    other = made.copy()
    other.custom_meta[0]["tag"] = other.field_schema["ids"]["per_sample_shapes"][0] = 9
    assert (made.custom_meta, made.get_shapes("ids")) == ([{"tag": 0}], [(1,)])


def test_chunks_are_near_equal_with_larger_ones_first() -> None:
    assert [part.global_indexes for part in meta(5).chunk(3)] == [[0, 1], [2, 3], [4]]
    assert [len(part) for part in meta(1).chunk(3)] == [1, 0, 0]
    with pytest.raises(ValueError, match="at least 1"):
        meta().chunk(0)


def test_chunk_by_partition_keeps_first_seen_order() -> None:
    made = BatchMeta([5, 6, 7, 8], ["b", "a", "b", "c"])
    assert [(part.partition_ids[0], part.global_indexes) for part in made.chunk_by_partition()] == [
        ("b", [5, 7]),
        ("a", [6]),
        ("c", [8]),
    ]


def test_union_joins_columns_of_the_same_rows_and_the_other_wins() -> None:
    left = BatchMeta([0, 1], ["p", "p"], {"a": DENSE, "b": DENSE}, [1, 1], {"k": 1}, [{"t": 1, "l": 1}, {}])
    right = BatchMeta([0, 1], ["p", "p"], {"b": {**DENSE, "shape": (9,)}}, [1, 0], {"k": 2}, [{"t": 2}, {"r": 1}])
    joined = left.union(right)
    assert joined.field_names == ["a", "b"]
    assert joined.get_shapes("b") == [(9,), (9,)]
    assert joined.extra_info == {"k": 2}
    assert joined.custom_meta == [{"t": 2, "l": 1}, {"r": 1}]
    assert joined.production_status.tolist() == [1, 0]
    assert left.custom_meta == [{"t": 1, "l": 1}, {}]


def test_union_with_an_empty_side_copies_the_other() -> None:
    made = meta(2)
    for joined in (made.union(None), made.union(BatchMeta()), BatchMeta().union(made)):
        assert joined is not made
        assert joined.global_indexes == [0, 1]


def test_union_of_different_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="global_indexes do not match"):
        meta(2).union(meta(3))
    with pytest.raises(ValueError, match="partition_ids do not match"):
        meta(2).union(meta(2, partition="q"))


def test_concat_joins_rows() -> None:
    joined = BatchMeta.concat([meta(2, extra_info={"a": 1}), BatchMeta(), meta(1, extra_info={"b": np.ones(2)})])
    assert joined.global_indexes == [0, 1, 0]
    assert joined.custom_meta == [{"tag": 0}, {"tag": 1}, {"tag": 0}]
    assert joined.get_shapes("ids") == [(1,), (2,), (1,)]
    assert joined.get_shapes("x") == [(3,)] * 3
    assert joined.is_ready
    assert sorted(joined.extra_info) == ["a", "b"]


def test_concat_of_dense_parts_with_differing_row_shapes_is_nested() -> None:
    parts = [BatchMeta([i], ["p"], {"x": {**DENSE, "shape": (i + 1,)}}) for i in range(2)]
    joined = BatchMeta.concat(parts)
    assert joined.field_schema["x"]["is_nested"]
    assert joined.get_shapes("x") == [(1,), (2,)]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (BatchMeta([1], ["p"], {"y": DENSE}), "Field names do not match"),
        (BatchMeta([1], ["p"], {"x": {**DENSE, "dtype": torch.int8}}), "dtype of field 'x'"),
        (BatchMeta([1], ["p"], {"x": DENSE}, extra_info={"k": np.ones(2)}), "conflicting values"),
    ],
)
def test_concat_refuses_what_does_not_fit(other: BatchMeta, text: str) -> None:
    first = BatchMeta([0], ["p"], {"x": DENSE}, extra_info={"k": np.zeros(2)})
    with pytest.raises(ValueError, match=text):
        BatchMeta.concat([first, other])
    assert len(BatchMeta.concat([first, other], validate=False)) == 2


@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
def test_a_mask_picks_the_rows_where_it_is_true_and_is_no_list_of_positions(form: Callable[..., Any]) -> None:
    assert meta(4).select_samples(form([True, False, True, False])).global_indexes == [0, 2]
    assert meta(2).select_samples(form([False, False])).global_indexes == []
    with pytest.raises(ValueError, match="mask of 2 entries for 4 rows"):
        meta(4).select_samples(form([True, False]))
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("indices", lambda: meta(2).reorder(form([True, False]))),
        ("indexes", lambda: kv("a", "b").reorder(form([True, False]))),
        ("sample_indices", lambda: meta(2).select_samples([True, 0])),
        ("sample_indices", lambda: meta(2).select_samples(form([[True], [False]]))),
        ("chunks", lambda: meta(2).chunk(form([True])[0])),
    ]
    for name, call in calls:
        with pytest.raises(InvalidTypeError, match=name):
            call()


def test_reorder_permutes_in_place() -> None:
    made = meta(3)
    assert made.reorder([2, 0, 1]) is None
    assert made.global_indexes == [2, 0, 1]
    assert made.get_shapes("ids") == [(3,), (1,), (2,)]
    assert made.custom_meta[0] == {"tag": 2}
    for indices in ([0, 1], [0, 0, 1], [1, 2, 3]):
        with pytest.raises(ValueError, match="permutation"):
            made.reorder(indices)


# ------------------------------------------------------------------------------------------------------------ schemas


def test_field_schema_of_a_batch_and_of_the_controllers_description_agree() -> None:
    batch = TensorDict(
        {
            "one": torch.zeros(2),
            "many": torch.zeros(2, 3, 4, dtype=torch.bfloat16),
            "text": ["a", "b"],
            "ragged": torch.nested.nested_tensor_from_jagged(torch.zeros(5, 2), torch.tensor([0, 1, 5])),
        },
        [2],
    )
    described = [
        FieldSchema("one", "dense", "float32", ()),
        FieldSchema("many", "dense", "bfloat16", (3, 4)),
        FieldSchema("text", "text", "str"),
        FieldSchema("ragged", "ragged", "float32", (None, 2)),
    ]
    schema = describe_fields(described, 2, {"ragged": np.array([1, 4], "<i4").tobytes()})
    assert schema == extract_field_schema(batch)
    assert schema["one"]["shape"] == (1,)
    assert schema["text"] == {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    assert schema["ragged"]["per_sample_shapes"] == [(1, 2), (4, 2)]


# ------------------------------------------------------------------------------------------------------ 0.1.5 classes


def sample(index: int, **status: ProductionStatus) -> SampleMeta:
    return SampleMeta("p", index, {name: FieldMeta(name, torch.int64, (), state) for name, state in status.items()})


READY, MISSING = ProductionStatus.READY_FOR_CONSUME, ProductionStatus.NOT_PRODUCED


def test_batches_are_made_of_samples() -> None:
    samples = [sample(7, x=READY), sample(9, x=MISSING)]
    for made in (
        BatchMeta(samples),
        BatchMeta(samples=samples, extra_info={"k": 1}),
        BatchMeta.from_samples(samples, {"k": 1}),
    ):
        assert (made.global_indexes, made.partition_ids, made.field_names) == ([7, 9], ["p", "p"], ["x"])
        assert made.production_status.tolist() == [1, 0]
        assert made.get_shapes("x") == [(), ()]
    assert [s.batch_index for s in samples] == [0, 1]
    assert BatchMeta(samples=[]).size == 0


def test_samples_know_their_fields() -> None:
    made = sample(1, x=READY, y=MISSING)
    assert (made.field_names, made.is_ready, made.has_field("x"), made.has_field("z")) == (
        ["x", "y"],
        False,
        True,
        False,
    )
    assert made.production_status == {"x": READY, "y": MISSING}
    assert (made.is_field_ready("x"), made.is_field_ready("y"), made.is_field_ready("z")) == (True, False, False)
    assert made.get_field_by_name("z") is None
    assert made.select_fields(["x", "z"]).is_ready
    assert made.add_fields({"y": FieldMeta("y", torch.int64, (), READY)}).is_ready
    assert sample(1, x=MISSING).union(sample(1, x=READY)).is_ready
    with pytest.raises(ValueError, match="do not match"):
        sample(1, x=READY).union(sample(2, x=READY))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: KVBatchMeta("ab", [{}, {}]), "keys"),  # type: ignore[arg-type]
        (lambda: KVBatchMeta(None, []), "keys must be a list, not None"),  # type: ignore[arg-type]
        (lambda: KVBatchMeta(["a"], 5), "tags must be a list, not 5"),  # type: ignore[arg-type]
        (lambda: KVBatchMeta(["a"], [{}], "p", 5), "fields must be a list, not 5"),  # type: ignore[arg-type]
        (lambda: BatchMeta([1], ["p"], {"x": None}), "field_schema of 'x'"),  # type: ignore[dict-item]
        (lambda: BatchMeta([1], ["p"], custom_meta=5), "custom_meta must be a list"),  # type: ignore[arg-type]
        (lambda: KVBatchMeta(["a", "b"], [{}, {}]).reorder([0.0, 1.0]), "indexes"),  # type: ignore[list-item]
        (lambda: KVBatchMeta(["a"], [{}]).chunk(1.5), "chunks"),  # type: ignore[arg-type]
        (lambda: KVBatchMeta.concat([5]), "list of KVBatchMeta, not of int"),  # type: ignore[list-item]
        (lambda: KVBatchMeta.concat(KVBatchMeta()), "list of KVBatchMeta, not KVBatchMeta"),  # type: ignore[arg-type]
        (lambda: BatchMeta(None, ["p"]), "global_indexes"),  # type: ignore[arg-type]
        (lambda: BatchMeta([1], ["p"], field_schema=5), "field_schema"),  # type: ignore[arg-type]
        (lambda: BatchMeta([1], ["p"]).union(5), "other"),  # type: ignore[arg-type]
        (lambda: BatchMeta.concat([5]), "list of BatchMeta, not of int"),  # type: ignore[list-item]
        (lambda: BatchMeta([1], ["p"]).add_fields(5), "TensorDict"),  # type: ignore[arg-type]
        (lambda: BatchMeta([1], ["p"]).update_custom_meta([5]), "custom_meta"),  # type: ignore[list-item]
    ],
)
def test_a_wrong_type_is_refused_by_its_name(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(InvalidTypeError, match=name):
        call()


def test_numbers_of_numpy_count_as_numbers() -> None:
    meta = KVBatchMeta(["a", "b"], [{}, {}])
    assert [part.keys for part in meta.chunk(np.int64(2))] == [["a"], ["b"]]
    meta.reorder(np.array([1, 0]))
    assert meta.keys == ["b", "a"]
