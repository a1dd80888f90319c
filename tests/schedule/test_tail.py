from dataclasses import replace

import pytest

from megatron_bamboo.schedule.actions import TAIL_OPS, Op
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.one_f_one_b import one_f_one_b
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.tail import add_tail, mend_program
from megatron_bamboo.schedule.takeover import take_over
from megatron_bamboo.schedule.validate import ScheduleError, validate


def protected(num_stages: int, mode: Redundancy = Redundancy.LAZY) -> Schedule:
    return lower(add_redundancy(one_f_one_b(num_stages, 2), mode))


def tails(schedule: Schedule, tied: bool, sharded: bool = False) -> list[str]:
    whole = add_tail(schedule, tied, sharded)
    validate(whole)
    return [" ".join(str(a) for a in p if a.op in TAIL_OPS) for p in whole.programs]


def test_tied_tail_with_replicas() -> None:
    assert tails(protected(3), tied=True) == [
        "0REDUCE 0SEND_TIE 0TIE 0SEND_REFRESH 1RECV_REFRESH 0COMMIT 0STEP",
        "1REDUCE 1SEND_REFRESH 2RECV_REFRESH 1COMMIT 1STEP",
        "2REDUCE 2SEND_TIE 2TIE 2SEND_REFRESH 0RECV_REFRESH 2COMMIT 2STEP",
    ]


def test_without_redundancy_nothing_is_refreshed() -> None:
    assert tails(protected(2, Redundancy.NONE), tied=False) == [
        "0REDUCE 0COMMIT 0STEP",
        "1REDUCE 1COMMIT 1STEP",
    ]


def test_one_stage_has_both_roles_in_one_gradient() -> None:
    assert tails(protected(1, Redundancy.NONE), tied=True) == ["0REDUCE 0COMMIT 0STEP"]


@pytest.mark.parametrize(
    ("victim", "expected"),
    [
        (0, ["", "1REDUCE 2RECV_REFRESH 1COMMIT 1STEP"]),
        (1, ["0REDUCE 1REDUCE 0SEND_TIE 0TIE 0SEND_REFRESH 0COMMIT 0STEP", ""]),
    ],
)
def test_after_a_takeover_of_three_stages(victim: int, expected: list[str]) -> None:
    assert tails(take_over(protected(3), victim, {}), tied=True)[:2] == expected


def test_a_worker_with_both_roles_adds_them_locally() -> None:
    both = "0REDUCE 2REDUCE 0TIE 2TIE 2SEND_REFRESH 2COMMIT 2STEP"
    assert tails(take_over(protected(3), 0, {}), tied=True)[2] == both


def test_parameters_are_gathered_after_the_step() -> None:
    assert tails(protected(3), tied=False, sharded=True) == [
        "0REDUCE 0SEND_REFRESH 1RECV_REFRESH 0COMMIT 0STEP 0GATHER 1RGATHER",
        "1REDUCE 1SEND_REFRESH 2RECV_REFRESH 1COMMIT 1STEP 1GATHER 2RGATHER",
        "2REDUCE 2SEND_REFRESH 0RECV_REFRESH 2COMMIT 2STEP 0RGATHER 2GATHER",
    ]
    assert tails(protected(2, Redundancy.NONE), tied=False, sharded=True) == [
        "0REDUCE 0COMMIT 0STEP 0GATHER",
        "1REDUCE 1COMMIT 1STEP 1GATHER",
    ]


def test_digests_are_made_when_all_that_others_wait_for_is_sent() -> None:
    whole = add_tail(protected(2), tied=False, sharded=True, verifies=True)
    validate(whole)
    assert [" ".join(str(a) for a in p if a.op in TAIL_OPS) for p in whole.programs] == [
        "0REDUCE 0SEND_REFRESH 1RECV_REFRESH 0VERIFY 0COMMIT 0STEP 0GATHER 1RGATHER",
        "1REDUCE 1SEND_REFRESH 0RECV_REFRESH 1VERIFY 1COMMIT 1STEP 0RGATHER 1GATHER",
    ]
    without = (whole.programs[0], tuple(a for a in whole.programs[1] if a.op is not Op.VERIFY))
    with pytest.raises(ScheduleError, match="1VERIFY is missing"):
        validate(replace(whole, programs=without))


def test_all_mend_in_one_order_of_the_stages() -> None:
    schedule = protected(6)
    assert [str(a) for a in mend_program(schedule, 1, [1, 2])] == ["2RMEND", "1MEND"]
    assert [str(a) for a in mend_program(schedule, 2, [2, 3])] == ["2MEND", "3RMEND"]


def test_neighbours_gather_in_turns_and_not_in_a_chain() -> None:
    gathers = [text.split("STEP ")[1] for text in tails(protected(6), tied=False, sharded=True)]
    assert gathers == [
        *("0GATHER 1RGATHER", "2RGATHER 1GATHER", "2GATHER 3RGATHER"),
        *("4RGATHER 3GATHER", "4GATHER 5RGATHER", "0RGATHER 5GATHER"),
    ]


@pytest.mark.parametrize("num_stages", range(2, 9))
def test_no_tail_with_gathers_deadlocks_after_any_losses(num_stages: int) -> None:
    for first in range(num_stages):
        one_lost = take_over(protected(num_stages), first, {})
        tails(one_lost, tied=True, sharded=True)
        for second in one_lost.live_ranks:
            if all(one_lost.replicas[stage] is not None for stage in one_lost.stages_of(second)):
                tails(take_over(one_lost, second, {}), tied=True, sharded=True)


def test_gathers_that_wait_for_each_other_all_around_are_refused() -> None:
    whole = add_tail(protected(2), tied=False, sharded=True)
    swapped = (*whole.programs[0][:-2], *reversed(whole.programs[0][-2:]))
    with pytest.raises(ScheduleError, match="deadlock: waiting are rank 0 in 1RGATHER, rank 1 in"):
        validate(replace(whole, programs=(swapped, whole.programs[1])))


def test_a_holder_that_does_not_gather_is_refused() -> None:
    whole = add_tail(protected(2), tied=False, sharded=True)
    with pytest.raises(ScheduleError, match="1RGATHER is missing"):
        validate(replace(whole, programs=(whole.programs[0][:-1], whole.programs[1])))
    unstepped = (*whole.programs[0][:-3], *whole.programs[0][-2:], whole.programs[0][-3])
    with pytest.raises(ScheduleError, match="0GATHER needs 0STEP before it"):
        validate(replace(whole, programs=(unstepped, whole.programs[1])))
