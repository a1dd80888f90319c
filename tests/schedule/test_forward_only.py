"""An evaluation's schedule: forwards alone, valid in every shape and placement."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_steady import placements

from megatron_bamboo.schedule.actions import Op
from megatron_bamboo.schedule.costs import EQUAL_COSTS
from megatron_bamboo.schedule.forward_only import forward_only_schedule
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.schedule import Program, Schedule
from megatron_bamboo.schedule.simulate import simulate
from megatron_bamboo.schedule.validate import ScheduleError, validate

SIZES = (st.integers(1, 6), st.integers(1, 3), st.integers(1, 12))


def texts(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, program)) for program in schedule.programs]


def test_two_stages_of_two_chunks() -> None:
    assert texts(forward_only_schedule(compute_schedule(2, 2, 2))) == [
        "0.0F0 0.0SEND_F0 0.0F1 0.0SEND_F1 0.1RECV_F0 0.1F0 0.1SEND_F0 0.1RECV_F1 0.1F1 0.1SEND_F1",
        "1.0RECV_F0 1.0F0 1.0SEND_F0 1.0RECV_F1 1.0F1 1.0SEND_F1 1.1RECV_F0 1.1F0 1.1RECV_F1 1.1F1",
    ]


def test_a_rank_that_runs_two_stages_sends_itself_nothing() -> None:
    assert texts(forward_only_schedule(compute_schedule(3, 1, 2), (0, 0, 2))) == [
        "0.0F0 0.0F1 1.0F0 1.0SEND_F0 1.0F1 1.0SEND_F1",
        "",
        "2.0RECV_F0 2.0F0 2.0RECV_F1 2.0F1",
    ]


@given(*SIZES)
def test_it_takes_no_longer_than_it_must(
    num_stages: int, num_chunks: int, num_microbatches: int
) -> None:
    schedule = forward_only_schedule(compute_schedule(num_stages, num_chunks, num_microbatches))
    least = max(
        num_chunks * num_microbatches + num_stages - 1,
        num_chunks * num_stages + num_microbatches - 1,
    )
    assert simulate(schedule, EQUAL_COSTS).makespan == least * EQUAL_COSTS.of(
        schedule.programs[0][0]
    )


@given(placements(), st.integers(1, 3), st.integers(1, 6))
def test_each_placement_has_a_valid_one(
    placement: tuple[int, ...], num_chunks: int, num_microbatches: int
) -> None:
    compute = compute_schedule(len(placement), num_chunks, num_microbatches)
    schedule = forward_only_schedule(compute, placement)
    validate(schedule)
    simulate(schedule, EQUAL_COSTS)
    forwards = [a for program in schedule.programs for a in program if a.op is Op.F]
    assert len(forwards) == len(placement) * num_chunks * num_microbatches


@pytest.mark.parametrize(
    ("programs", "reason"),
    [
        (compute_schedule(1, 1, 1).programs, r"0.0B0 is outside of the schedule"),
        (((),), r"0.0F0 is missing"),
    ],
)
def test_backwards_and_missing_forwards_are_refused(
    programs: tuple[Program, ...], reason: str
) -> None:
    schedule = forward_only_schedule(compute_schedule(1, 1, 1))
    with pytest.raises(ScheduleError, match=reason):
        validate(replace(schedule, programs=programs))
