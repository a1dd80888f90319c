"""Which waits the coordinator believes in: those it has heard of for a lease, and lately."""

import pytest

from megatron_bamboo.agent.long_waits import LongWaits
from megatron_bamboo.membership.waits import Wait, Waiting

LEASE = 4.0
BEAT = 1.0


class Ear:
    """A coordinator that hears of the waits of node0 at each of its signs of life."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = LongWaits(LEASE, lambda: self.now)

    def hear(self, seconds: float, number: int = 1) -> None:
        """For some time; the wait is of 100 s, though nobody was there to hear of it."""
        wait = Wait("node0", number, 5, "0COMMIT", Waiting(("node1",)), 100.0, 10.0)
        for _ in range(round(seconds / BEAT)):
            self.pass_time(BEAT)
            self.waits.hear("node0", [wait])

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            self.waits.lasting()

    @property
    def heard(self) -> list[int]:
        return [wait.number for wait in self.waits.lasting()]


@pytest.fixture
def ear() -> Ear:
    return Ear()


def test_a_wait_counts_when_it_was_heard_of_for_a_lease(ear: Ear) -> None:
    ear.hear(LEASE)
    assert ear.heard == []
    ear.hear(BEAT)
    assert ear.heard == [1]


def test_another_wait_begins_anew(ear: Ear) -> None:
    ear.hear(LEASE + BEAT)
    ear.hear(LEASE, number=2)
    assert ear.heard == []


def test_who_has_gone_on_waits_no_more(ear: Ear) -> None:
    ear.hear(LEASE + BEAT)
    ear.waits.hear("node0", [])
    assert ear.heard == []


def test_what_was_heard_long_ago_may_be_over(ear: Ear) -> None:
    ear.hear(LEASE + BEAT)
    ear.pass_time(LEASE / 2)
    assert ear.heard == []


def test_a_coordinator_that_was_stopped_has_not_heard(ear: Ear) -> None:
    ear.hear(BEAT)
    ear.now += 10 * LEASE
    ear.hear(BEAT)
    assert ear.heard == []


@pytest.mark.parametrize("forgets", ["node", "all"])
def test_what_is_forgotten_is_gone(ear: Ear, forgets: str) -> None:
    ear.hear(LEASE + BEAT)
    if forgets == "node":
        ear.waits.forget("node0")
    else:
        ear.waits.clear()
    assert ear.heard == []
