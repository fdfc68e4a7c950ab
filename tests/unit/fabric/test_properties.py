"""What holds on any machine: names, listing order and bus numbers are labels and never decide."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.fabric import Choice, Distance, Fabric, Gid, Gpu, Hca, Port, choose
from transfer_queue.fabric.spread import spread

DISTANCES = st.sampled_from([*Distance, None])
PORTS = st.builds(
    Port,
    number=st.just(1),
    state=st.sampled_from(["ACTIVE", "ACTIVE", "ACTIVE", "DOWN"]),
    link_layer=st.sampled_from(["InfiniBand", "InfiniBand", "Ethernet", "Unspecified"]),
    rate=st.sampled_from([25.0, 100.0, 200.0, 400.0]),
    gids=st.sampled_from([(), (Gid(0, "fe80::1", "IB/RoCE v1"),), (Gid(0, "fe80::1", "IB/RoCE v1"),)]),
)


@st.composite
def fabrics(draw: st.DrawFn) -> Fabric:
    gpus = tuple(
        Gpu(i, f"0000:{i + 1:02x}:00.0", numa=draw(st.integers(-1, 1)), index=i) for i in range(draw(st.integers(0, 6)))
    )
    hcas = tuple(
        Hca(
            f"mlx5_{i}",
            (draw(PORTS),),
            address=f"0001:{i + 1:02x}:00.0",
            numa=draw(st.integers(-1, 1)),
            uverbs=f"uverbs{i}",
            node=draw(st.sampled_from(["ok", "ok", "ok", "missing"])),
        )
        for i in range(draw(st.integers(0, 7)))
    )
    return Fabric(gpus, hcas, {(gpu.address, hca.name): draw(DISTANCES) for gpu in gpus for hca in hcas})


def chosen(choice: Choice) -> dict[str, tuple[str, ...]]:
    return {c.gpu.address: c.hcas for c in choice.gpus}


def loads(choice: Choice) -> list[int]:
    return sorted(sum(hca.name in c.hcas for c in choice.gpus) for hca in choice.usable)


@given(fabrics(), st.randoms(use_true_random=False))
def test_renaming_hcas_renames_the_choice(fabric: Fabric, random: object) -> None:
    names = [hca.name for hca in fabric.hcas]
    shuffled = list(names)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    new = dict(zip(names, shuffled, strict=True))
    renamed = replace(
        fabric,
        hcas=tuple(replace(hca, name=new[hca.name]) for hca in fabric.hcas),
        distances={(gpu, new[hca]): distance for (gpu, hca), distance in fabric.distances.items()},
    )
    before, after = choose(fabric), choose(renamed)
    assert chosen(after) == {gpu: tuple(new[hca] for hca in hcas) for gpu, hcas in chosen(before).items()}
    assert {e.hca: e.rule for e in after.excluded} == {new[e.hca]: e.rule for e in before.excluded}


@given(fabrics(), st.randoms(use_true_random=False))
def test_listing_order_does_not_matter(fabric: Fabric, random: object) -> None:
    gpus, hcas = list(fabric.gpus), list(fabric.hcas)
    random.shuffle(gpus)  # type: ignore[attr-defined]
    random.shuffle(hcas)  # type: ignore[attr-defined]
    assert choose(replace(fabric, gpus=tuple(gpus), hcas=tuple(hcas))) == choose(fabric)


@given(fabrics(), st.randoms(use_true_random=False))
def test_renumbering_the_bus_keeps_distances_and_loads(fabric: Fabric, random: object) -> None:
    addresses = [hca.address for hca in fabric.hcas]
    random.shuffle(addresses)  # type: ignore[attr-defined]
    hcas = tuple(replace(hca, address=new) for hca, new in zip(fabric.hcas, addresses, strict=True))
    before, after = choose(fabric), choose(replace(fabric, hcas=hcas))
    assert [c.distance for c in after.gpus] == [c.distance for c in before.gpus]
    assert {e.hca: e.rule for e in after.excluded} == {e.hca: e.rule for e in before.excluded}
    first = [[c.hcas[:1] for c in choice.gpus] for choice in (before, after)]
    counts = [sorted(names.count(name) for name in set(names)) for names in first]
    assert counts[0] == counts[1]


@given(fabrics())
def test_every_gpu_gets_the_nearest_usable_hcas_and_none_that_is_excluded(fabric: Fabric) -> None:
    choice = choose(fabric)
    usable = {hca.name for hca in choice.usable}
    assert usable.isdisjoint(e.hca for e in choice.excluded)
    assert usable | {e.hca for e in choice.excluded} == {hca.name for hca in fabric.hcas}
    assert all(e.reason for e in choice.excluded)
    for c in choice.gpus:
        assert bool(c.hcas) == bool(usable)
        assert sorted((*c.hcas, *c.fallback)) == sorted(usable)
        ranks = {
            name: 5 if (distance := fabric.distances[c.gpu.address, name]) is None else distance for name in usable
        }
        assert all(ranks[name] == min(ranks.values()) for name in c.hcas)


@given(fabrics())
def test_only_a_dead_rail_leaves_nothing_while_other_hcas_live(fabric: Fabric) -> None:
    choice = choose(fabric)
    facts = {"no-uverbs", "no-port", "not-active", "link-layer", "no-gid"}
    rules = {e.hca: e.rule for e in choice.excluded}
    if not choice.usable and not set(rules.values()) <= facts:
        given = {hca.name for hca in fabric.hcas if hca.node != "missing"}
        assert any(rules[name] in facts for name in given)


@given(st.integers(1, 12), st.integers(1, 12))
def test_equal_hcas_are_loaded_evenly_and_none_idles(gpus: int, hcas: int) -> None:
    names = tuple(f"mlx5_{i}" for i in range(hcas))
    result = spread([names] * gpus, [-1] * gpus, dict.fromkeys(names, -1))
    per_hca = [sum(name in given for given in result) for name in names]
    per_gpu = [len(given) for given in result]
    assert max(per_hca) - min(per_hca) <= (1 if gpus >= hcas else 0)
    assert max(per_gpu) - min(per_gpu) <= 1
    assert min(per_hca) >= 1


@given(st.data())
def test_no_other_assignment_has_a_smaller_largest_load(data: st.DataObject) -> None:
    names = ["a", "b", "c", "d"]
    subsets = st.lists(st.sampled_from(names), min_size=1, unique=True).map(lambda s: tuple(sorted(s)))
    candidates = data.draw(st.lists(subsets, min_size=1, max_size=5))
    result = spread(candidates, [-1] * len(candidates), dict.fromkeys(names, -1))
    assert all(set(given) <= set(allowed) for given, allowed in zip(result, candidates, strict=True))
    firsts = [given[0] for given in result]

    def best(position: int, counts: dict[str, int]) -> int:
        if position == len(candidates):
            return max(counts.values())
        return min(best(position + 1, {**counts, n: counts.get(n, 0) + 1}) for n in candidates[position])

    assert max(firsts.count(name) for name in firsts) == best(0, {})
