"""The table of keys: a dictionary to its callers, whatever history it has, and in parts that do not grow together."""

from __future__ import annotations

import random

import pytest

from transfer_queue.control import key_table
from transfer_queue.control.key_table import KeyTable


@pytest.mark.parametrize("whole", [16, 1000])
def test_any_history_is_that_of_a_dictionary(monkeypatch: pytest.MonkeyPatch, whole: int) -> None:
    monkeypatch.setattr(key_table, "_WHOLE", whole)
    chance = random.Random(1)
    table, model = KeyTable(), dict[str, int]()
    for first in range(0, 4000, 5):
        new = [key for number in chance.sample(range(200), 5) if (key := f"k{number}") not in model]
        assert table.is_disjoint(new)
        table.add(new, range(first, first + len(new)))
        model.update(zip(new, range(first, first + len(new)), strict=True))
        gone = chance.sample([*model], min(len(model), chance.randrange(10)))
        if chance.random() < 0.7:
            table.remove(gone)
            model = {key: ordinal for key, ordinal in model.items() if key not in gone}
        asked = [f"k{number}" for number in chance.sample(range(200), 20)]
        assert table.find(asked, -1) == [model.get(key, -1) for key in asked]
        assert [table.get(key) for key in asked] == [model.get(key) for key in asked]
        assert table.is_disjoint(asked) == model.keys().isdisjoint(asked)
        assert (dict(table.items()), {*table}, len(table)) == (model, model.keys(), len(model))
    assert len(table._parts) == (64 if whole == 16 else 1)
    while table.drop(7):
        pass
    assert not table


def test_a_large_table_has_small_parts_of_differing_sizes() -> None:
    table, count = KeyTable(), 1 << 18
    table.add([f"k{number}" for number in range(count)], range(count))
    sizes = [len(part) for part in table._parts]
    assert len(sizes) == 64
    assert max(sizes) < 2.5 * count / 64
    assert min(sizes[-8:]) > 1.4 * max(sizes[:8])
