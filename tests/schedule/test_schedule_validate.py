from dataclasses import replace

import pytest

from megatron_bamboo.schedule.actions import Action
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.one_f_one_b import one_f_one_b
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.schedule import Program, Schedule
from megatron_bamboo.schedule.tail import add_tail
from megatron_bamboo.schedule.validate import ScheduleError, validate

GOOD = add_tail(lower(add_redundancy(one_f_one_b(2, 2), Redundancy.EAGER)), tied=True)


def actions(text: str) -> Program:
    return tuple(map(Action.parse, text.split()))


def edited(rank: int, old: str, new: str) -> Schedule:
    """The good schedule with one piece of one program's text replaced."""
    text = " ".join(map(str, GOOD.programs[rank])) + " "
    assert f"{old} " in text
    programs = list(GOOD.programs)
    programs[rank] = actions(text.replace(f"{old} ", f"{new} ", 1))
    return replace(GOOD, programs=tuple(programs))


def test_the_schedule_that_the_cases_edit_is_good() -> None:
    texts = [" ".join(map(str, program)) for program in GOOD.programs]
    assert texts == [
        "0.0F0 0.0SEND_F0 1.0RF0 0.0F1 0.0SEND_F1 1.0RF1 0.0RECV_B0 0.0B0 0.0RECV_B1 0.0B1 "
        "0REDUCE 0SEND_TIE 0TIE 0SEND_REFRESH 1RECV_REFRESH 0COMMIT 0STEP",
        "1.0RECV_F0 1.0F0 0.0RF0 1.0B0 1.0SEND_B0 1.0RECV_F1 1.0F1 0.0RF1 1.0B1 1.0SEND_B1 "
        "1REDUCE 1SEND_TIE 1TIE 1SEND_REFRESH 0RECV_REFRESH 1COMMIT 1STEP",
    ]
    validate(GOOD)


@pytest.mark.parametrize(
    ("rank", "old", "new", "reason"),
    [
        (0, "0.0F1", "", "0.0F1 is missing"),
        (0, "0.0B1", "", "0.0B1 is missing"),
        (0, "0.0F1", "0.0F1 0.0F1", "0.0F1 is there twice"),
        (0, "0.0F1", "0.0F1 1.0F1", "1.0F1 belongs to rank 1"),
        (0, "1.0RF0", "0.0RF0", "0.0RF0 belongs to rank 1"),
        (0, "0.0F1", "0.0F2", "0.0F2 is outside of the schedule"),
        (0, "0.0F1", "0.1F1", "0.1F1 is outside of the schedule"),
        (0, "0.0F0", "0.0RECV_F0 0.0F0", "0.0RECV_F0 is outside of the schedule"),
        (1, "1.0F0", "1.0F0 1.0SEND_F0", "1.0SEND_F0 is outside of the schedule"),
        (0, "0.0SEND_F1", "", "1.0RECV_F1 is never sent by 0.0SEND_F1"),
        (1, "1.0RECV_F1", "", "0.0SEND_F1 is never received by 1.0RECV_F1"),
        (0, "0.0F0 0.0SEND_F0", "0.0SEND_F0 0.0F0", "0.0SEND_F0 needs 0.0F0 before it"),
        (0, "0.0F0 0.0SEND_F0 1.0RF0", "1.0RF0 0.0F0 0.0SEND_F0", "1.0RF0 needs 0.0F0 before it"),
        (1, "1.0RECV_F0 1.0F0", "1.0F0 1.0RECV_F0", "1.0F0 needs 1.0RECV_F0 before it"),
        (0, "0.0B0 0.0RECV_B1 0.0B1", "0.0RECV_B1 0.0B1 0.0B0", "0.0B1 comes where microbatch 0"),
        (0, "0.0F1 0.0SEND_F1", "0.0RECV_B1 0.0F1 0.0SEND_F1", "0.0RECV_B1 is there twice"),
        (0, "0TIE", "", "0TIE is missing"),
        (0, "0SEND_REFRESH", "", "0SEND_REFRESH is missing"),
        (1, "1STEP", "", "1STEP is missing"),
        (0, "0COMMIT 0STEP", "0STEP 0COMMIT", "0STEP needs 0COMMIT before it"),
        (0, "0.0B1 0REDUCE", "0REDUCE 0.0B1", "0REDUCE needs 0.0B1 before it"),
        (0, "0TIE 0SEND_REFRESH", "0SEND_REFRESH 0TIE", "0SEND_REFRESH needs 0TIE before it"),
    ],
)
def test_each_kind_of_error_is_named(rank: int, old: str, new: str, reason: str) -> None:
    with pytest.raises(ScheduleError) as raised:
        validate(edited(rank, old, new))
    assert reason in str(raised.value)


def test_the_message_shows_the_grid_with_an_arrow() -> None:
    with pytest.raises(ScheduleError) as raised:
        validate(edited(0, "0.0F0 0.0SEND_F0", "0.0SEND_F0 0.0F0"))
    assert str(raised.value).splitlines()[:4] == [
        "rank 0, action 0: 0.0SEND_F0 needs 0.0F0 before it",
        "      rank 0         rank 1",
        "0  -> 0.0SEND_F0     1.0RECV_F0",
        "1     0.0F0          1.0F0",
    ]


def test_what_is_missing_is_shown_at_the_end_of_its_program() -> None:
    with pytest.raises(ScheduleError, match=r"-> \(end\)"):
        validate(replace(lower(one_f_one_b(2, 1)), programs=(GOOD.programs[0][:1], ())))


def test_a_circle_of_waits_is_a_deadlock() -> None:
    programs = (
        actions("0.0F0 0.0RECV_B0 0.0SEND_F0 0.0B0"),
        actions("1.0RECV_F0 1.0F0 1.0B0 1.0SEND_B0"),
    )
    with pytest.raises(ScheduleError, match=r"rank 0 in 0.0RECV_B0, rank 1 in 1.0RECV_F0"):
        validate(replace(one_f_one_b(2, 1), programs=programs))


def test_a_refresh_before_the_own_send_is_a_deadlock() -> None:
    programs = tuple(
        actions(text.replace("A", "SEND_REFRESH").replace("Z", "RECV_REFRESH"))
        for text in (
            "0.0F0 0.0SEND_F0 0.0RECV_B0 0.0B0 0REDUCE 1Z 0A 0COMMIT 0STEP",
            "1.0RECV_F0 1.0F0 1.0B0 1.0SEND_B0 1REDUCE 0Z 1A 1COMMIT 1STEP",
        )
    )
    lazy = add_redundancy(one_f_one_b(2, 1), Redundancy.LAZY)
    with pytest.raises(ScheduleError, match="rank 0 in 1RECV_REFRESH, rank 1 in 0RECV_REFRESH"):
        validate(replace(lazy, programs=programs))


def test_computation_alone_lacks_its_messages() -> None:
    with pytest.raises(ScheduleError, match=r"0.0B0 needs 1.0B0 of rank 1 and does not receive it"):
        validate(one_f_one_b(2, 2))


def test_what_was_done_before_must_not_be_there_again() -> None:
    done = frozenset(actions("0.0F0"))
    with pytest.raises(ScheduleError, match=r"0.0F0 was done before"):
        validate(GOOD, done)
    with pytest.raises(ScheduleError, match=r"1.0RECV_F0 was done before"):
        validate(GOOD, received=frozenset(actions("1.0RECV_F0")))


def test_backwards_done_before_must_be_the_first_ones() -> None:
    programs = (actions("0.0B0"),)
    schedule = replace(one_f_one_b(1, 2), programs=programs)
    with pytest.raises(ScheduleError, match=r"0.0B0 comes where microbatch 1 is next"):
        validate(schedule, frozenset(actions("0.0F0 0.0F1 0.0B1")))
