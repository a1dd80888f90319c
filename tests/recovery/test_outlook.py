"""What is expected of the future, and when a change pays."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.recovery.outlook import Weighing, expected_seconds
from megatron_bamboo.recovery.view import History


def test_a_new_job_expects_what_is_assumed() -> None:
    assert expected_seconds(History(50.0), 50.0) == 600


def test_what_happens_often_is_expected_soon() -> None:
    every_minute = History(0.0, tuple(60.0 * n for n in range(1, 31)))
    assert expected_seconds(every_minute, 1800.0) == 2400 / 31
    # An hour later nothing of that counts any more.
    assert expected_seconds(every_minute, 1800.0 + 3600.0) == 4200


def test_a_change_has_to_earn_back_its_move_and_its_pause() -> None:
    weighing = Weighing(expected=100, before=2, after=1, moving=20, pause=10)
    assert (weighing.unchanged, weighing.changed, weighing.pays) == (50, 80, True)
    assert not Weighing(expected=100, before=2, after=1, moving=20, pause=41).pays
    # Who is still moving at the next event has gained nothing.
    assert Weighing(expected=100, before=2, after=1, moving=120, pause=10).changed == 50


def test_it_counts_what_the_next_event_would_undo() -> None:
    slower = Weighing(100, 1.0, 1.001, 0.0, 0.0, undone=0.25)
    assert (slower.unchanged, slower.pays) == (99.75, True)
    assert not Weighing(100, 1.0, 1.001, 0.0, 0.0, undone=0.25, undone_then=0.25).pays
    assert not Weighing(1000, 1.0, 1.001, 0.0, 0.0, undone=0.25).pays


positive = st.floats(0.1, 1000)


@given(positive, positive, positive, positive, positive)
def test_no_slower_pipelines_ever_pay(
    expected: float, before: float, slower: float, moving: float, pause: float
) -> None:
    assert not Weighing(expected, before, before + slower, moving, pause).pays
    # Nor do equally fast ones, whatever is rounded.
    assert not Weighing(expected, before, before, moving, 0.0).pays
