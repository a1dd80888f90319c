from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.costs import EQUAL_COSTS, Costs
from megatron_bamboo.schedule.generate import compute_schedule, stage_program
from megatron_bamboo.schedule.interleaved import group_sizes, interleaved
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.one_f_one_b import one_f_one_b
from megatron_bamboo.schedule.schedule import Program
from megatron_bamboo.schedule.simulate import simulate
from megatron_bamboo.schedule.validate import validate


def megatron_program(
    stage: int, num_stages: int, num_chunks: int, num_microbatches: int
) -> Program:
    """What forward_backward_pipelining_with_interleaving computes, from its own two functions.

    The microbatches of a group in a row are as many as the stages, its default. Backwards of a
    chunk take its microbatches as its forwards did.
    """
    communicator = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: num_stages, rank=lambda: stage),
        virtual_pipeline_model_parallel_size=num_chunks,
    )
    table = get_schedule_table(num_microbatches, num_chunks, num_stages)
    total, _, num_warmup, num_remaining = get_pp_rank_microbatches(
        num_microbatches, num_chunks, num_stages, p2p_communicator=communicator
    )
    forwards = [Action(stage, chunk, Op.F, m) for m, chunk in table]
    backwards = [Action(stage, num_chunks - 1 - chunk, Op.B, m) for m, chunk in table]
    program = forwards[:num_warmup]
    for k in range(num_remaining):
        program += [forwards[k + num_warmup], backwards[k]]
    return (*program, *(backwards[k] for k in range(num_remaining, total)))


@pytest.mark.parametrize(("num_stages", "num_chunks"), [*product((2, 3, 4, 8), (2, 3, 4))])
def test_order_is_that_of_megatron_with_interleaving(num_stages: int, num_chunks: int) -> None:
    for num_groups in (1, 2, 3, 5):
        shape = (num_stages, num_chunks, num_groups * num_stages)
        schedule = interleaved(*shape)
        for stage in range(num_stages):
            assert schedule.programs[stage] == megatron_program(stage, *shape)


def test_chunks_of_two_stages() -> None:
    texts = [" ".join(map(str, program)) for program in interleaved(2, 2, 2).programs]
    assert texts == [
        "0.0F0 0.0F1 0.1F0 0.1F1 0.1B0 0.1B1 0.0B0 0.0B1",
        "1.0F0 1.0F1 1.1F0 1.1B0 1.1F1 1.1B1 1.0B0 1.0B1",
    ]


def stated_length(num_stages: int, num_chunks: int, num_microbatches: int) -> int:
    """An iteration, where a forward and a backward of a chunk take 1 together."""
    work_and_way = num_chunks * num_microbatches + num_stages - 1
    way_and_last_chunk = num_chunks * num_stages + num_microbatches - 1
    return max(work_and_way, way_and_last_chunk)


@given(st.integers(1, 7), st.integers(1, 4), st.integers(1, 18))
def test_any_shape_is_valid_and_takes_the_stated_time(
    num_stages: int, num_chunks: int, num_microbatches: int
) -> None:
    shape = (num_stages, num_chunks, num_microbatches)
    schedule = lower(interleaved(*shape))
    validate(schedule)
    timeline = simulate(schedule, EQUAL_COSTS)
    assert timeline.makespan == 3 * stated_length(*shape)
    bubble = 3 * (stated_length(*shape) - num_chunks * num_microbatches)
    assert [timeline.idle(rank) for rank in range(num_stages)] == [bubble] * num_stages


@pytest.mark.parametrize("num_stages", [2, 3, 4, 5])
def test_a_forward_and_a_backward_of_other_costs_take_the_stated_time(num_stages: int) -> None:
    costs = Costs(forward=0.5, backward=0.75)
    for num_chunks, num_microbatches in product((2, 3), range(1, 13)):
        shape = (num_stages, num_chunks, num_microbatches)
        timeline = simulate(lower(interleaved(*shape)), costs)
        assert timeline.makespan == 1.25 * stated_length(*shape), shape


@given(st.integers(1, 9), st.integers(1, 50))
def test_groups_are_as_equal_as_can_be_and_no_smaller_than_the_pipeline(
    num_stages: int, num_microbatches: int
) -> None:
    sizes = group_sizes(num_stages, num_microbatches)
    assert sum(sizes) == num_microbatches
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(num_stages, num_microbatches)
    assert max(sizes) < 2 * num_stages


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 12))
def test_forwards_in_flight_are_bounded_as_stated(
    num_stages: int, num_chunks: int, num_microbatches: int
) -> None:
    group = max(group_sizes(num_stages, num_microbatches))
    for stage, program in enumerate(interleaved(num_stages, num_chunks, num_microbatches).programs):
        in_flight = most = 0
        for action in program:
            in_flight += 1 if action.op is Op.F else -1
            most = max(most, in_flight)
        assert most <= 2 * (num_stages - stage - 1) + (num_chunks - 1) * group + 1


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 12))
def test_one_chunk_is_not_interleaved_and_each_stage_can_be_asked_for(
    num_stages: int, num_chunks: int, num_microbatches: int
) -> None:
    schedule = compute_schedule(num_stages, num_chunks, num_microbatches)
    assert schedule.num_chunks == num_chunks
    if num_chunks == 1:
        assert schedule == one_f_one_b(num_stages, num_microbatches)
    for stage in range(num_stages):
        shape = (num_stages, num_chunks, num_microbatches)
        assert schedule.programs[stage] == stage_program(stage, *shape)


@pytest.mark.parametrize("shape", [(0, 2, 1), (2, 0, 1), (2, 2, 0), (2, -1, 4)])
def test_nothing_to_interleave_is_refused(shape: tuple[int, int, int]) -> None:
    for generator in (interleaved, compute_schedule):
        with pytest.raises(ValueError, match="at least one stage, one chunk and one microbatch"):
            generator(*shape)
