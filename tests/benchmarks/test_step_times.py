"""Which iterations count as calm, and what a change is found to hold up."""

from dataclasses import replace

import pytest
from planned_changes import Fetch, Record, changes_of
from step_times import Step, calm, calm_seconds

ONE = Step(2, 7.0, 14.0, "0123x8", 0, 0, False, False, False, False)


def course(*changes: dict[str, object]) -> tuple[Step, ...]:
    """Iterations in a row, each by what it is other than the one before."""
    steps = [ONE]
    for change in changes:
        fleeting = {"moves": False, "loses": False, "is_redone": False, "follows_save": False}
        after = replace(steps[-1], number=steps[-1].number + 1, **fleeting)  # type: ignore[arg-type]
        steps.append(replace(after, **change))  # type: ignore[arg-type]
    return tuple(steps)


LOSS = {"epoch": 1, "loses": True, "seconds": 9.0, "arranged": "0023x8"}
MOVE = {"epoch": 2, "moves": True, "seconds": 8.2}
SWITCH = {"seconds": 8.1}
CALM = {"seconds": 8.0}
TAKEN_OVER = course({}, LOSS, MOVE, SWITCH, CALM, CALM)


def test_what_has_just_happened_is_no_calm() -> None:
    assert [step.number for step in calm(TAKEN_OVER)] == [3, 7, 8]


def test_iterations_are_compared_with_calm_ones_that_are_arranged_alike() -> None:
    assert calm_seconds([TAKEN_OVER]) == {"0123x8": 7.0, "0023x8": 8.0}


def test_a_change_has_held_up_the_iteration_in_which_state_moved_and_the_next() -> None:
    record = Record(TAKEN_OVER, {5: "node3 shadows stage 1"}, (Fetch(5, 100, 0.5),), 1.0)
    (change,) = changes_of({"new shadows": [record]}, 7.0)
    assert change.move == pytest.approx(0.2 / 7) and change.switch == pytest.approx(0.1 / 7)
    assert change.held_up == pytest.approx(0.3 / 7)
    assert change.cells()[-2:] == ("100", "0.50 s")


def test_a_change_upon_a_change_is_measured_by_its_own_iteration_alone() -> None:
    steps = course({}, LOSS, MOVE, {"epoch": 3, "moves": True, "seconds": 9.5}, SWITCH, CALM, CALM)
    first, second = changes_of({"job": [Record(steps, {5: "first", 6: "second"}, (), 1.0)]}, 7.0)
    assert first.switch is None and first.held_up == first.move
    assert second.move == pytest.approx(1.5 / 7)


def test_what_nothing_compares_with_is_not_measured() -> None:
    record = Record(course({}, LOSS, MOVE), {5: "node3 shadows stage 1"}, (), 1.0)
    (change,) = changes_of({"job": [record]}, 7.0)
    assert change.held_up is None and change.cells()[2:5] == ("", "", "")
