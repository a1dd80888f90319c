import pytest

from megatron_bamboo.schedule.actions import TAIL_OPS
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.one_f_one_b import one_f_one_b
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.tail import add_tail
from megatron_bamboo.schedule.takeover import take_over
from megatron_bamboo.schedule.validate import validate


def protected(num_stages: int, mode: Redundancy = Redundancy.LAZY) -> Schedule:
    return lower(add_redundancy(one_f_one_b(num_stages, 2), mode))


def tails(schedule: Schedule, tied: bool) -> list[str]:
    whole = add_tail(schedule, tied)
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
