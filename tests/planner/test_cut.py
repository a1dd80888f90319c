"""The best cut is the best of all cuts."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.planner.arrangement import StageSpan, check_spans
from megatron_bamboo.planner.cut import Cut, Cutter, cut_at


def every_cut(works: list[int], num_stages: int) -> Iterator[Cut]:
    for inner in itertools.combinations(range(1, len(works)), num_stages - 1):
        yield cut_at(works, list(itertools.pairwise((0, *inner, len(works)))))


def sizes(cut: Cut) -> list[int]:
    return [past - first for first, past in cut.spans]


@pytest.mark.parametrize(
    ("num_stages", "time"), [(1, 168), (2, 196), (3, 234), (4, 222), (5, 270), (6, 318)]
)
def test_known_times(num_stages: int, time: int) -> None:
    assert Cutter([2, 4, 6, 8, 10, 12]).best(num_stages).planned_time == time


def test_known_cuts() -> None:
    cutter = Cutter([2, 4, 6, 8, 10, 12])
    assert cutter.best(3).works == (12, 18, 12)
    assert cutter.best(4).works == (12, 8, 10, 12)


def test_where_keeping_one_best_for_each_part_is_not_enough() -> None:
    best = Cutter([21, 2, 3, 21, 1]).best(3)
    assert (best.works, best.planned_time) == ((23, 3, 22), 280)


def test_no_stage_is_without_a_unit() -> None:
    cutter = Cutter([2, 4, 6, 8, 10, 12])
    with pytest.raises(ValueError, match="7 stages: the model has 6 units"):
        cutter.best(7)
    with pytest.raises(ValueError, match="0 stages"):
        cutter.best(0)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=9)
    | st.lists(st.integers(1, 10**6), min_size=1, max_size=9)
)
def test_no_other_cut_is_faster(works: list[int]) -> None:
    cutter = Cutter(works)
    for num_stages in range(1, len(works) + 1):
        found = cutter.best(num_stages)
        check_spans(found.spans)
        assert found == cut_at(works, found.spans)
        every = list(every_cut(works, num_stages))
        fastest = min(cut.planned_time for cut in every)
        assert found.planned_time == fastest
        # The rule for ties.
        tied = [cut for cut in every if cut.planned_time == fastest]
        assert _rank(found) == min(map(_rank, tied))


def _rank(cut: Cut) -> tuple[int, int, StageSpan]:
    k = cut.slowest
    return cut.work_of_slowest, k, cut.spans[k]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 99))
def test_the_time_is_the_formula(works: list[int], num_microbatches: int) -> None:
    cut = cut_at(works, [(unit, unit + 1) for unit in range(len(works))])
    slowest = max(works)
    k = max(stage for stage, work in enumerate(works) if work == slowest)
    waits = (num_microbatches - len(works) + k - 1) * slowest
    assert cut.time(num_microbatches) == sum(works) + waits + sum(works[k:])


def test_stages_that_are_not_the_slowest_are_filled_from_the_end() -> None:
    """Early stages hold most activations at once, so they get what is left."""
    assert sizes(Cutter([1, 1, 1, 1, 1, 9]).best(3)) == [2, 3, 1]
