"""Losses without progress are counted in the store; a step that passes begins the count anew."""

from megatron_bamboo.agent.progress import Failures
from megatron_bamboo.membership.table import Table


def test_each_loss_after_the_same_step_counts() -> None:
    failures = Failures(Table())
    assert [failures.note(7) for _ in range(3)] == [1, 2, 3]


def test_progress_begins_the_count_anew() -> None:
    failures = Failures(Table())
    assert [failures.note(step) for step in (7, 7, 8, 8, 10)] == [1, 2, 1, 2, 1]


def test_the_next_coordinator_goes_on_counting() -> None:
    table = Table()
    Failures(table).note(7)
    assert Failures(table).note(7) == 2
