"""What a cut needs of memory, and that the search keeps what it promises."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.planner.cut import Cut, Cutter, cut_at
from megatron_bamboo.planner.fitting import Fitter
from megatron_bamboo.planner.layers import Unit, UnitBytes, UnitCosts
from megatron_bamboo.planner.memory import Memory, NodeMemory, most_microbatches


def costs_of(rows: list[tuple[int, int, int]], message_bytes: int = 0) -> UnitCosts:
    """Units by work, state and activations."""
    units = (
        Unit(f"layer{i}", work / 2, work / 2, UnitBytes(state, saved))
        for i, (work, state, saved) in enumerate(rows)
    )
    return UnitCosts(tuple(units), message_bytes)


def every_cut(costs: UnitCosts, num_stages: int) -> Iterator[Cut]:
    works = costs.works().ticks
    for inner in itertools.combinations(range(1, len(works)), num_stages - 1):
        yield cut_at(works, list(itertools.pairwise((0, *inner, len(works)))))


def peak(costs: UnitCosts, cut: Cut) -> int:
    return max(node.total(4 * cut.num_stages) for node in Memory(costs).of_cut(cut.spans))


def test_a_node_has_room_for_a_takeover_and_for_its_next_replica() -> None:
    costs = costs_of([(1, 100, 1), (1, 200, 10), (1, 400, 100), (1, 800, 1000)], 7)
    nodes = Memory(costs).of_cut(((0, 1), (1, 2), (2, 3), (3, 4)))
    # In flight are 4, 3, 2 and 1 microbatches; the first and the last stage have one neighbour.
    assert nodes == (
        NodeMemory(100, 200, 400, 4 * 1 + 3 * 10, 3 * 7 * (1 + 2)),
        NodeMemory(200, 400, 800, 3 * 10 + 2 * 100, 3 * 7 * (2 + 2)),
        NodeMemory(400, 800, 100, 2 * 100 + 1000, 3 * 7 * (2 + 1)),
        NodeMemory(800, 100, 200, 1000 + 4 * 1, 3 * 7 * (1 + 1)),
    )
    assert nodes[0].total(8) == 100 + 200 + 400 + 34 + 8 * 63


def test_short_pipelines_hold_no_stage_twice() -> None:
    costs = costs_of([(1, 100, 1), (1, 200, 10)], 7)
    both, one = Memory(costs).of_cut(((0, 1), (1, 2))), Memory(costs).of_cut(((0, 2),))
    assert both[0] == NodeMemory(100, 200, 0, 2 * 1 + 10, 42)
    # Within a stage, what units give to each other is saved.
    assert one == (NodeMemory(300, 0, 0, 2 * (1 + 10 + 7), 0),)


def test_the_log_limits_the_microbatches() -> None:
    nodes = Memory(costs_of([(1, 100, 1), (1, 200, 10)], 7)).of_cut(((0, 1), (1, 2)))
    assert most_microbatches(nodes, 312 + 42 * 5 + 41) == 5
    assert most_microbatches(nodes, 311) == 0
    assert most_microbatches([NodeMemory(9, 0, 0, 0, 0)], 9) is None


ROWS = st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 3))


@given(st.lists(ROWS, min_size=1, max_size=8), st.integers(0, 60), st.integers(0, 1))
def test_of_small_models_no_fitting_cut_is_faster(
    rows: list[tuple[int, int, int]], limit: int, message_bytes: int
) -> None:
    costs = costs_of(rows, message_bytes)
    cutter, fitter = Cutter(costs.works().ticks), Fitter(costs, limit, kept=1000)
    for num_stages in range(1, len(rows) + 1):
        found = fitter.best(num_stages, cutter.best(num_stages))
        fitting = [cut for cut in every_cut(costs, num_stages) if peak(costs, cut) <= limit]
        assert found.is_proven
        if found.cut is None:
            assert not fitting
        else:
            assert found.cut in fitting
            assert found.cut.planned_time == min(cut.planned_time for cut in fitting)


@given(st.lists(ROWS, min_size=6, max_size=9), st.integers(10, 60))
def test_what_is_said_to_be_proven_is_so_whatever_is_left_out(
    rows: list[tuple[int, int, int]], limit: int
) -> None:
    costs = costs_of(rows)
    free = Cutter(costs.works().ticks).best(4)
    found = Fitter(costs, limit, kept=2).best(4, free)
    times = [cut.planned_time for cut in every_cut(costs, 4) if peak(costs, cut) <= limit]
    if found.cut is None:
        assert not found.is_proven or not times
    else:
        assert peak(costs, found.cut) <= limit
        assert found.cut.planned_time >= min(times)
        assert not found.is_proven or found.cut.planned_time == min(times)


def test_costs_without_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="not known what the units take"):
        Memory(UnitCosts((Unit("layer0", 1, 2),)))
