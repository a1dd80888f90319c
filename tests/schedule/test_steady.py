"""Whole iterations under any placement: valid, and further losses are survived."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from symbolic_run import SymbolicRun
from test_schedule_takeover import (
    MODES,
    assert_all_gradients,
    num_events_of,
    protected,
    take_over_exactly,
)

from megatron_bamboo.schedule.actions import COMPUTE_OPS, Op
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.redundancy import Redundancy, shadows_of
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.steady import steady_schedule
from megatron_bamboo.schedule.tail import add_tail
from megatron_bamboo.schedule.validate import validate

MODE = st.sampled_from(MODES)


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, ...]:
    """Some ranks are lost; each stage of theirs is on any live one."""
    num_stages = draw(st.integers(2, 6))
    live = draw(st.sets(st.integers(0, num_stages - 1), min_size=1))
    elsewhere = st.sampled_from(sorted(live))
    return tuple(stage if stage in live else draw(elsewhere) for stage in range(num_stages))


def steady(
    placement: tuple[int, ...], num_chunks: int, num_microbatches: int, mode: Redundancy
) -> Schedule:
    compute = compute_schedule(len(placement), num_chunks, num_microbatches)
    return steady_schedule(compute, placement, shadows_of(placement), mode)


@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 6), MODE)
def test_with_all_nodes_it_is_the_schedule_that_a_job_starts_with(
    num_stages: int, num_chunks: int, num_microbatches: int, mode: Redundancy
) -> None:
    found = steady(tuple(range(num_stages)), num_chunks, num_microbatches, mode)
    assert found == protected(num_stages, num_chunks, num_microbatches, mode)


@given(placements(), st.integers(1, 3), st.integers(1, 6), MODE)
def test_each_placement_has_a_valid_schedule(
    placement: tuple[int, ...], num_chunks: int, num_microbatches: int, mode: Redundancy
) -> None:
    schedule = steady(placement, num_chunks, num_microbatches, mode)
    validate(add_tail(schedule, tied=True))
    runs = [a for program in schedule.programs for a in program if a.op in COMPUTE_OPS]
    assert len(runs) == len(set(runs))
    run = SymbolicRun(schedule, Random(0))
    run.run_to_end()
    assert_all_gradients(run)


@given(placements(), st.integers(1, 3), st.integers(1, 5), MODE, st.data())
def test_the_next_loss_is_survived_at_any_moment(
    placement: tuple[int, ...],
    num_chunks: int,
    num_microbatches: int,
    mode: Redundancy,
    data: st.DataObject,
) -> None:
    schedule = steady(placement, num_chunks, num_microbatches, mode)
    if len(schedule.live_ranks) < 2:
        return
    run = SymbolicRun(schedule, Random(data.draw(st.integers(0, 2**16))))
    run.run(data.draw(st.integers(0, num_events_of(len(placement), num_chunks, num_microbatches))))
    take_over_exactly(run, data.draw(st.sampled_from(schedule.live_ranks)))
    run.run_to_end()
    assert_all_gradients(run)


def test_a_node_with_two_stages_shadows_the_next_and_is_shadowed_by_the_one_before() -> None:
    assert shadows_of((0, 1, 1, 3)) == (3, 0, 0, 1)
    assert shadows_of((3, 1, 2, 3)) == (2, 3, 1, 2)
    assert shadows_of((0, 0)) == (None, None)
    schedule = steady((0, 1, 1, 3), 1, 2, Redundancy.EAGER)
    redundant = [
        [str(action) for action in program if action.op is Op.RF] for program in schedule.programs
    ]
    # The input of stage 2 never leaves rank 1, so its replica's forwards run after a loss alone.
    assert redundant == [
        ["1.0RF0", "1.0RF1"],
        ["3.0RF0", "3.0RF1"],
        [],
        ["0.0RF0", "0.0RF1"],
    ]
