"""One answer for ever to the question whether this worker passed a commit."""

import threading
from collections.abc import Callable, Sequence

import pytest

from megatron_bamboo.execution.commit import to_hex
from megatron_bamboo.execution.errors import EpochEnded, PeerLost
from megatron_bamboo.execution.ledger import CommitLedger
from megatron_bamboo.membership.decision import Record, StepDecision

VECTOR = (0.1, 2.0)
APPLIED = StepDecision(7, True, to_hex(VECTOR), "node1 passed its commit")
NOT_APPLIED = StepDecision(7, False, None, "nobody passed it")


def nothing() -> None:
    return


def fail() -> Sequence[float]:
    raise PeerLost(("node1",), "all-reduce", None)


def failed_in(step: int) -> CommitLedger:
    """A worker that entered a commit and did not get through."""
    ledger = CommitLedger("node0")
    with pytest.raises(PeerLost):
        ledger.commit(step, fail, nothing)
    return ledger


class Blocked:
    """A collective that waits until it is released, and then ends as it is told to."""

    def __init__(self, end: Callable[[], Sequence[float]]) -> None:
        self.entered = threading.Event()
        self.released = threading.Event()
        self._end = end

    def collective(self) -> Sequence[float]:
        self.entered.set()
        assert self.released.wait(10)
        return self._end()

    def commit(self, ledger: CommitLedger) -> None:
        try:
            ledger.commit(7, self.collective, self.released.set)
        except PeerLost:
            return


def record_of_one_who_leaves_in_it(end: Callable[[], Sequence[float]]) -> Record:
    ledger, blocked = CommitLedger("node0"), Blocked(end)
    main = threading.Thread(target=blocked.commit, args=[ledger])
    main.start()
    assert blocked.entered.wait(10)
    record = ledger.leave(0)
    main.join(10)
    assert not main.is_alive()
    return record


def test_a_worker_that_has_entered_nothing_says_so() -> None:
    assert CommitLedger("node0").leave(0) == Record("node0", 0, False, False, None)


def test_a_passed_commit_hands_over_its_exact_vector() -> None:
    ledger = CommitLedger("node0")
    ledger.commit(7, lambda: VECTOR, nothing)
    assert ledger.passed_vector(7) == VECTOR
    assert ledger.passed_vector(8) is None
    assert ledger.leave(0) == Record("node0", 7, True, True, to_hex(VECTOR))


def test_a_failed_commit_was_entered_and_not_passed() -> None:
    ledger = failed_in(7)
    assert ledger.passed_vector(7) is None
    assert ledger.leave(0) == Record("node0", 7, True, False, None)


def test_the_commit_that_counts_is_the_newest() -> None:
    ledger = CommitLedger("node0")
    ledger.commit(6, lambda: VECTOR, nothing)
    with pytest.raises(PeerLost):
        ledger.commit(7, fail, nothing)
    assert ledger.leave(0) == Record("node0", 7, True, False, None)


def test_leaving_releases_the_collective_and_waits_for_its_end() -> None:
    assert record_of_one_who_leaves_in_it(fail) == Record("node0", 7, True, False, None)


def test_a_collective_that_ends_well_after_all_has_passed() -> None:
    record = record_of_one_who_leaves_in_it(lambda: VECTOR)
    assert record == Record("node0", 7, True, True, to_hex(VECTOR))


def test_who_has_left_enters_no_commit_until_it_follows_the_next_plan() -> None:
    ledger, entered = CommitLedger("node0"), []

    def collective() -> Sequence[float]:
        entered.append(True)
        return VECTOR

    before = ledger.leave(0)
    with pytest.raises(EpochEnded):
        ledger.commit(1, collective, nothing)
    assert not entered
    assert ledger.leave(0) == before
    ledger.follow(1)
    ledger.commit(1, collective, nothing)
    assert ledger.passed_vector(1) == VECTOR


def test_a_plan_followed_late_does_not_let_in_whoever_left_its_epoch_too() -> None:
    ledger = CommitLedger("node0")
    ledger.leave(0)
    ledger.leave(1)
    ledger.follow(1)
    with pytest.raises(EpochEnded):
        ledger.commit(1, lambda: VECTOR, nothing)


def test_a_vector_is_handed_over_before_the_next_record() -> None:
    ledger = failed_in(7)
    ledger.leave(0)
    ledger.decide(APPLIED)
    assert ledger.passed_vector(7) == VECTOR
    # Without follow(): the main thread has not come to the plan when the next loss is announced.
    assert ledger.leave(1) == Record("node0", 7, True, True, to_hex(VECTOR))


def test_a_step_that_was_not_applied_is_open_again_in_the_next_record() -> None:
    ledger = failed_in(7)
    ledger.leave(0)
    ledger.decide(NOT_APPLIED)
    assert ledger.leave(1) == Record("node0", 7, False, False, None)


def test_whoever_passed_keeps_its_own_vector() -> None:
    ledger = CommitLedger("node0")
    ledger.commit(7, lambda: VECTOR, nothing)
    ledger.decide(StepDecision(7, True, to_hex((5.0, 5.0)), "another"))
    assert ledger.passed_vector(7) == VECTOR


def test_no_one_takes_back_a_passed_step() -> None:
    ledger = CommitLedger("node0")
    ledger.commit(7, lambda: VECTOR, nothing)
    with pytest.raises(AssertionError, match="passed step"):
        ledger.decide(NOT_APPLIED)
    assert ledger.passed_vector(7) == VECTOR


@pytest.mark.parametrize(
    "decision", [None, StepDecision(6, False, None, ""), StepDecision(8, False, None, "")]
)
def test_a_decision_about_another_step_changes_nothing(decision: StepDecision | None) -> None:
    ledger = failed_in(7)
    ledger.decide(decision)
    assert ledger.leave(0) == Record("node0", 7, True, False, None)


def test_a_record_says_after_which_step_all_parameters_are_there() -> None:
    ledger = CommitLedger("node0")
    assert ledger.leave(0).gathered == ledger.gathered == 0
    ledger.note_gathered(7)
    assert ledger.leave(1).gathered == 7
