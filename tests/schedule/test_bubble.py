import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.schedule.actions import Op
from megatron_bamboo.schedule.costs import EQUAL_COSTS, Costs
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.simulate import simulate
from megatron_bamboo.schedule.validate import validate


@pytest.mark.parametrize(
    ("num_chunks", "num_placed"),
    [(1, (15, 15, 15, 15, 15, 15, 15, 16)), (2, (21, 20, 19, 18, 17, 16, 15, 21))],
)
def test_known_numbers_fit_into_the_gaps(num_chunks: int, num_placed: tuple[int, ...]) -> None:
    schedule = add_redundancy(compute_schedule(8, num_chunks, 16), Redundancy.BUBBLE)
    placed = tuple(sum(a.op is Op.RF for a in program) for program in schedule.programs)
    assert placed == num_placed


def test_a_redundant_forward_comes_where_its_worker_would_wait() -> None:
    schedule = add_redundancy(compute_schedule(3, 1, 2), Redundancy.BUBBLE)
    texts = [" ".join(map(str, program)) for program in schedule.programs]
    assert texts == [
        "0.0F0 0.0F1 1.0RF0 1.0RF1 0.0B0 0.0B1",
        "1.0F0 1.0F1 2.0RF0 2.0RF1 1.0B0 1.0B1",
        "0.0RF0 0.0RF1 2.0F0 2.0B0 2.0F1 2.0B1",
    ]


def test_what_a_gap_does_not_hold_whole_is_left_out() -> None:
    # On rank 0, gaps of 8 and 6 for forwards of 7.
    costs = Costs(forward=(1.0, 7.0), backward=(3.0, 2.0))
    schedule = add_redundancy(compute_schedule(2, 1, 2), Redundancy.BUBBLE, costs)
    texts = [" ".join(map(str, program)) for program in schedule.programs]
    assert texts == [
        "0.0F0 0.0F1 1.0RF0 0.0B0 0.0B1",
        "0.0RF0 1.0F0 1.0B0 1.0F1 1.0B1 0.0RF1",
    ]


def test_costs_of_another_shape_are_refused_by_the_pass() -> None:
    with pytest.raises(ValueError, match="costs of 3 stages, not of 2"):
        add_redundancy(compute_schedule(2, 1, 2), Redundancy.BUBBLE, Costs(forward=(1.0, 1.0, 1.0)))


@st.composite
def shapes_and_costs(draw: st.DrawFn) -> tuple[int, int, int, Costs]:
    num_stages, num_chunks = draw(st.integers(2, 6)), draw(st.integers(1, 3))
    seconds = st.floats(0.01, 10)
    by_stage = st.tuples(*[st.tuples(*[seconds] * num_chunks)] * num_stages)
    costs = Costs(draw(by_stage), draw(by_stage), draw(st.floats(0, 3)))
    return num_stages, num_chunks, draw(st.integers(1, 9)), costs


@given(shapes_and_costs())
def test_no_iteration_gets_longer(case: tuple[int, int, int, Costs]) -> None:
    *shape, costs = case
    compute = compute_schedule(*shape)
    schedule = lower(add_redundancy(compute, Redundancy.BUBBLE, costs))
    validate(schedule)
    before = simulate(lower(compute), costs)
    after = simulate(schedule, costs)
    assert after.makespan == before.makespan
    for old, new in zip(before.rows, after.rows, strict=True):
        assert [timed for timed in new if timed.action.op is not Op.RF] == list(old)


@given(shapes_and_costs())
def test_no_gap_is_left_that_would_hold_one_more(case: tuple[int, int, int, Costs]) -> None:
    """Of equal forwards, as many as can be: none that has its input is left out before a gap."""
    num_stages, num_chunks, num_microbatches, _ = case
    compute = compute_schedule(num_stages, num_chunks, num_microbatches)
    schedule = add_redundancy(compute, Redundancy.BUBBLE)
    timeline = simulate(lower(schedule), EQUAL_COSTS)
    for rank, row in enumerate(timeline.rows):
        done = {timed.action for timed in row}
        stage = schedule.replicas.index(rank)
        left_out = [
            forward.with_op(Op.RF)
            for forward in compute.programs[stage]
            if forward.op is Op.F and forward.with_op(Op.RF) not in done
        ]
        ended = 0.0
        available = {None}
        for timed in (*row, None):
            start = timeline.makespan if timed is None else timed.start
            if start - ended >= 1:
                assert all(schedule.producer_of(a) not in available for a in left_out)
            if timed is not None:
                ended = timed.end
                available.add(timed.action)
