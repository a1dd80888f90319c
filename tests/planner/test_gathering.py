"""When nodes that come to a job of which nobody was left begin."""

import pytest

from megatron_bamboo.planner.gathering import Gathered, Verdict, decide_beginning

QUIET, UNTIL = 5.0, 3600.0


def decide(there: int, newest_at: float, now: float) -> Verdict:
    return decide_beginning(Gathered(there, 4, newest_at, now), QUIET, UNTIL)


@pytest.mark.parametrize(
    ("there", "newest_at", "now", "verdict"),
    [
        (0, 0.0, 9.0, Verdict(False, "no node has come", UNTIL)),
        (0, 9.0, UNTIL, Verdict(False, "no node has come", UNTIL)),
        (1, 10.0, 10.0, Verdict(False, "1 of 4 nodes are there", 15.0)),
        (3, 13.0, 15.0, Verdict(False, "3 of 4 nodes are there", 18.0)),
        (4, 14.0, 14.0, Verdict(True, "all 4 nodes are there", 14.0)),
        (5, 14.0, 14.0, Verdict(True, "all 4 nodes are there", 14.0)),
        (3, 13.0, 18.0,
         Verdict(True, "3 of 4 nodes are there, and for 5 s no other has come", 18.0)),
        (1, 3598.0, 3599.0, Verdict(False, "1 of 4 nodes are there", UNTIL)),
        (1, 3598.0, UNTIL,
         Verdict(True, "1 of 4 nodes are there, and the time for nodes to come is over", UNTIL)),
    ],
)  # fmt: skip
def test_those_who_are_there_begin_when_all_are_or_nobody_else_comes(
    there: int, newest_at: float, now: float, verdict: Verdict
) -> None:
    assert decide(there, newest_at, now) == verdict
