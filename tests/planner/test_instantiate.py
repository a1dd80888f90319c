"""The pipelines chosen are the fastest of all that the nodes can make up."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bamboo.planner.cut import Cutter
from megatron_bamboo.planner.instantiate import Instantiator, Multiset
from megatron_bamboo.planner.layers import Unit, UnitCosts
from megatron_bamboo.planner.microbatches import Pace, least_time, split
from megatron_bamboo.planner.templates import TemplateMaker

EVEN = UnitCosts(tuple(Unit(f"layer{i}", 1, 2) for i in range(24)))


def paces_up_to(sizes: range, costs: UnitCosts) -> dict[int, Pace]:
    return {n: template.pace for n, template in TemplateMaker(costs).make_all(sizes).items()}


def every_multiset(sizes: list[int], nodes: int) -> Iterator[tuple[int, ...]]:
    """Ascending numbers of nodes that add up."""
    if nodes == 0:
        yield ()
        return
    for place, size in enumerate(sizes):
        if size <= nodes:
            for rest in every_multiset(sizes[place:], nodes - size):
                yield (size, *rest)


def paces_of(paces: dict[int, Pace], sizes: tuple[int, ...]) -> list[Pace]:
    return [paces[size] for size in sizes]


def enumerated(paces: dict[int, Pace], nodes: int, f: int, num_microbatches: int) -> list[Multiset]:
    """All that can do the microbatches, fastest first."""
    found = []
    for sizes in every_multiset(sorted(paces), nodes):
        used = paces_of(paces, sizes)
        mosts = [num_microbatches if pace.most is None else pace.most for pace in used]
        if f < len(sizes) <= num_microbatches and sum(mosts) >= num_microbatches and all(mosts):
            found.append(Multiset(least_time(used, num_microbatches), sizes))
    return sorted(found)


@pytest.mark.parametrize(
    ("nodes", "sizes", "numbers", "time"),
    [(7, (2, 2, 3), (7, 7, 10), 288), (6, (2, 2, 2), (8, 8, 8), 324)],
)
def test_known_arrangements(
    nodes: int, sizes: tuple[int, ...], numbers: tuple[int, ...], time: int
) -> None:
    paces = paces_up_to(range(2, 6), EVEN)
    best, *_ = Instantiator(paces, nodes, 1, 24).best(20)
    assert best == Multiset(time, sizes)
    assert split(paces_of(paces, sizes), 24) == numbers


def test_known_times_of_others() -> None:
    paces = paces_up_to(range(2, 6), EVEN)
    times = {found.sizes: found.time for found in Instantiator(paces, 7, 1, 24).best(20)}
    assert times == {(2, 2, 3): 288, (3, 4): 306, (2, 5): 309}


def test_known_numbers_of_multisets() -> None:
    paces = paces_up_to(range(2, 12), EVEN)
    found = [len(Instantiator(paces, nodes, 1, 24).best(99)) for nodes in range(4, 14)]
    assert found == [1, 1, 3, 3, 6, 7, 11, 13, 20, 23]


def test_too_few_nodes_make_up_nothing() -> None:
    paces = paces_up_to(range(2, 6), EVEN)
    assert Instantiator(paces, 3, 1, 24).best(20) == ()
    assert Instantiator({}, 3, 1, 24).best(20) == ()


LIMITS = st.none() | st.integers(0, 12)


@given(
    st.lists(st.integers(1, 9), min_size=3, max_size=9),
    st.dictionaries(st.integers(1, 9), LIMITS, min_size=1),
    st.integers(1, 18),
    st.integers(0, 3),
    st.integers(1, 24),
    st.sampled_from([1, 5, 20]),
)
def test_the_best_are_those_of_enumerating_all(
    works: list[int],
    limits: dict[int, int | None],
    nodes: int,
    f: int,
    num_microbatches: int,
    wanted: int,
) -> None:
    cutter = Cutter(works)
    paces = {}
    for size in sorted(limits):
        if size <= len(works):
            cut = cutter.best(size)
            paces[size] = Pace(cut.time_before, cut.work_of_slowest, limits[size])
    found = Instantiator(paces, nodes, f, num_microbatches).best(wanted)
    every = enumerated(paces, nodes, f, num_microbatches)
    assert [one.time for one in found] == [one.time for one in every[:wanted]]
    assert set(found) <= set(every)


@settings(max_examples=10)
@given(
    st.lists(st.integers(1, 99), min_size=12, max_size=12),
    st.integers(24, 32),
    st.integers(0, 2),
    st.integers(8, 64),
)
def test_up_to_32_nodes_as_well(
    works: list[int], nodes: int, f: int, num_microbatches: int
) -> None:
    units = (Unit(f"layer{i}", work / 2, work / 2) for i, work in enumerate(works))
    paces = paces_up_to(range(2, 13), UnitCosts(tuple(units)))
    found = Instantiator(paces, nodes, f, num_microbatches).best(20)
    every = enumerated(paces, nodes, f, num_microbatches)
    assert [one.time for one in found] == [one.time for one in every[:20]]
