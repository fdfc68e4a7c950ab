"""Objects in another version of the API: nothing but the version changes, there and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.operator.queues import document
from tests.unit.operator.test_plan import SPECS
from tq_operator.admission.conversion import convert_review
from transfer_queue.config import resource

OLD, NEW = "transferqueue.io/v1alpha1", "transferqueue.io/v1beta1"
KEYS = st.text(max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)
OBJECTS = st.fixed_dictionaries(
    {
        "apiVersion": st.just(OLD),
        "kind": st.sampled_from(["TransferQueue", "TransferQueueBinding"]),
        "metadata": st.dictionaries(KEYS, VALUES, max_size=4),
        "spec": st.dictionaries(KEYS, VALUES, max_size=4),
        "status": st.dictionaries(KEYS, VALUES, max_size=4),
    }
)


def convert(objects: list[Any], desired: Any) -> dict[str, Any]:
    answer = convert_review({"request": {"uid": "1", "desiredAPIVersion": desired, "objects": objects}})
    assert answer["response"]["uid"] == "1"
    found: dict[str, Any] = answer["response"]
    return found


@given(st.lists(OBJECTS, max_size=3))
def test_there_and_back_is_the_same_object(objects: list[dict[str, Any]]) -> None:
    there = convert(objects, NEW)["convertedObjects"]
    assert [item["apiVersion"] for item in there] == [NEW] * len(objects)
    assert [{**item, "apiVersion": OLD} for item in there] == objects
    assert convert(there, OLD)["convertedObjects"] == objects


@pytest.mark.parametrize("name", SPECS)
def test_the_library_reads_the_same_queue_from_both_versions(name: str) -> None:
    old = document(SPECS[name])
    (new,) = convert([old], NEW)["convertedObjects"]
    assert resource.parse(new).spec == resource.parse(old).spec


@pytest.mark.parametrize(
    ("item", "desired"), [({"apiVersion": OLD}, "other/v1"), ({"apiVersion": "other/v1"}, NEW), (5, NEW), ({}, None)]
)
def test_an_unknown_version_is_a_failure_that_names_those_there_are(item: Any, desired: Any) -> None:
    result = convert([item], desired)["result"]
    assert result["status"] == "Failure"
    assert result["message"].endswith(f"this operator knows {OLD}, {NEW}")


@pytest.mark.parametrize("garbage", [None, [], {}, {"request": 5}, {"request": {"uid": "1", "objects": {}}}])
def test_garbage_is_refused(garbage: Any) -> None:
    with pytest.raises(ValueError, match="not a ConversionReview"):
        convert_review(garbage)
