"""Times that contradict each other are refused with the rule that they break."""

from dataclasses import replace

import pytest

from megatron_bamboo.agent.job import Deadlines, JobShape
from megatron_bamboo.agent.sizes import check_order
from megatron_bamboo.errors import UserError
from megatron_bamboo.planner.arrangement import equal_pipelines

SHAPE = JobShape(equal_pipelines(3, 1, 4), "lazy", train_iters=5, global_batch_size=4)


def test_what_is_so_by_default_is_in_order() -> None:
    check_order(SHAPE, Deadlines())


def test_the_shortest_lease_is_in_order() -> None:
    check_order(replace(SHAPE, lease_seconds=1.0), Deadlines())


@pytest.mark.parametrize(
    ("shape", "deadlines", "message"),
    [
        (
            {"lease_seconds": 5.0, "group_timeout_seconds": 12.0},
            {},
            r"--bamboo-lease and a second \(6 s\) must be less than half of "
            r"--distributed-timeout-minutes \(6 s\): who waits for a worker must not give up",
        ),
        (
            {"lease_seconds": 20.0, "group_timeout_seconds": 44.0},
            {},
            r"2.25 times --bamboo-lease and a second \(46 s\) must be less than "
            r"--distributed-timeout-minutes \(44 s\): who waits must not give up before a broken",
        ),
        (
            {"group_timeout_seconds": 20.0},
            {"record_seconds": 20.0},
            r"--record-deadline \(20 s\) must be less than --distributed-timeout-minutes \(20 s\)",
        ),
        (
            {"lease_seconds": 30.0},
            {"store_seconds": 10.0},
            r"--bamboo-lease and a second \(31 s\) must be less than --store-deadline \(10 s\)",
        ),
        (
            {"group_timeout_seconds": 600.0},
            {"stall_seconds": 300.0},
            r"--distributed-timeout-minutes \(600 s\) must be less than --stall-limit \(300 s\)",
        ),
    ],
)
def test_contradictions(shape: dict[str, float], deadlines: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_order(replace(SHAPE, **shape), replace(Deadlines(), **deadlines))
