"""What has happened in a job, summed up from what was said."""

import pytest
from story import Story

from megatron_bamboo.evaluation.due import Kind
from megatron_bamboo.planner.healing import Vacancy
from megatron_bamboo.watching.history import KEPT_LINES, History, Loss
from megatron_bamboo.watching.loss_kinds import LossKind, kind_of


def told() -> Story:
    story = Story(standbys=("node6",)).begin().train(5).lose("node1").train(2)
    story.heal((Vacancy(0, 1), "node6")).make_change().train(3)
    story.lose("node4", "node0", cause="nothing was heard of it for 5.1 s")
    story.join("node1.2")
    return story


def test_what_happened_is_counted() -> None:
    history = told().history()
    assert (history.takeovers, history.changes, history.returned) == (3, 1, 1)
    assert [loss.node for loss in history.losses] == ["node1", "node4", "node0"]
    assert [loss.kind for loss in history.losses] == [
        LossKind.CONNECTION,
        LossKind.SILENCE,
        LossKind.SILENCE,
    ]
    assert history.step == 11


def test_a_stage_is_without_replica_from_the_step_of_the_loss_to_that_of_the_change() -> None:
    story = Story().begin().train(5)
    assert {p.since_step for row in story.history().protection for p in row} == {0}
    # With node1 go the stage that it ran and the replica of the next one.
    lost = story.lose("node1").train(2).history().protection[0]
    assert [(p.has_replica, p.since_step) for p in lost] == [(True, 0), (False, 5), (False, 5)]
    healed = story.heal().train(1).make_change().history().protection
    assert [(p.has_replica, p.since_step) for p in healed[0]] == [(True, 0), (True, 9), (True, 9)]
    assert all(p == healed[1][0] for p in healed[1])


def test_facts_may_come_in_any_portions() -> None:
    facts, whole = told().facts, told().history()
    for size in (1, 2, 7):
        history, last = History(), 0
        for first in range(0, len(facts), size):
            history = history.after(facts[first : first + size])
            counted = history.takeovers + history.changes + len(history.losses) + history.step
            assert counted >= last
            last = counted
        assert history == whole


def test_only_the_newest_lines_are_kept_and_none_of_an_iteration() -> None:
    story = Story().begin().train(3)
    for number in range(KEPT_LINES + 2):
        story.line(f"note {number}")
    lines = story.history().lines
    assert len(lines) == KEPT_LINES
    assert lines[0].endswith("note 2") and lines[-1].endswith(f"note {KEPT_LINES + 1}")


def test_saves_are_counted_by_how_they_ended() -> None:
    story = Story().begin()
    for step, failure in ((5, None), (10, "the disk is full"), (15, None), (20, "no space")):
        story.event("checkpoint", step=step, failure=failure, folder="ckpt", seconds=1.0)
    history = story.history()
    assert (history.saves, history.failed_saves, history.saved_step) == (2, 2, 15)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("its connection closed", LossKind.CONNECTION),
        ("nothing was heard of it for 5.0 s; before, it was in 1.0F0 of step 3", LossKind.SILENCE),
        ("its worker was ended by signal 9", LossKind.SIGNAL),
        ("its worker ended with status 0 before the training was over", LossKind.EXIT),
        ("its worker raised ValueError: its connection closed", LossKind.ERROR),
        ("its worker did not run for 5.0 s, in step 3, 1.0B0", LossKind.HANG),
        ("its worker was stuck for 9.0 s in step 3, 1.0B0", LossKind.HANG),
        ("the link between node1 and node2 is broken: node1 has waited for 9 s", LossKind.LINK),
        ("a link is broken: node1 and node2 did not come out of 1COMMIT", LossKind.LINK),
        ("it left no record within 5 s", LossKind.NO_RECORD),
        ("the step in which it was to join did not pass", LossKind.OTHER),
    ],
)
def test_each_cause_has_its_kind(cause: str, kind: LossKind) -> None:
    assert kind_of(cause) is kind
    assert Loss("node1", cause, 0.0).kind is kind


def test_the_newest_evaluation_on_validation_samples_is_kept() -> None:
    story = Story().begin()
    assert story.history().validation is None
    for step, kind, loss in (
        (5, Kind.INTERVAL, 3.0),
        (8, Kind.VALIDATION, 2.0),
        (8, Kind.TEST, 1.0),
    ):
        story.event(
            "evaluation", step=step, kind=kind, epoch=0, seconds=1.0, losses={"lm loss": loss.hex()}
        )
    kept = story.history().validation
    assert kept is not None and (kept.step, kept.main) == (8, ("lm loss", 2.0))
