"""Evaluations outlive losses: the training has the bits of one without any, and of one undisturbed.

With an interval of 2 and two global batches in each, there are evaluations after steps 2, 4 and 6,
and after the last one those of the validation and the test part.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from evidence import Expected
from forked_jobs import FinishedJob
from in_ci import several_in_ci
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.observe.compare import compare_runs, format_comparison
from megatron_bamboo.observe.saved_run import open_run

pytestmark = pytest.mark.multiprocess

SHAPE = Shape(2, 2, variant="evaluated")
DUE = [(2, "interval"), (4, "interval"), (6, "interval"), (7, "test"), (7, "validation")]
CASES = [
    # The first stage of a pipeline, and the last one, which reports and sums up.
    (SHAPE, ("node2@iter4:EVAL2/0.0F1",)),
    (SHAPE, ("node1@iter4:EVAL2/1.0F1",)),
    # Nobody is told by a closed connection.
    (SHAPE, ("node2@iter4:EVAL2/0.0F1:hang",)),
    # Both in one evaluation.
    (SHAPE, ("node0@iter2:EVAL1/0.0F0", "node3@iter2:EVAL2/1.0F3")),
    # After the last step, when nobody trains any more.
    (SHAPE, ("node1@iter7:EVAL1/1.0F2",)),
    # In the step before one, so that it begins under another plan.
    (SHAPE, ("node3@iter4:1COMMIT",)),
    (Shape(2, 1, variant="evaluated", num_chunks=2), ("node1@iter4:EVAL1/1.1F2",)),
    (Shape(2, 1, variant="evaluated", tensor_size=2), ("node1@iter4:EVAL2/1.0RECV_F1",)),
    (
        Shape.unequal(((1, 1, 1), (2, 1)), (5, 3), variant="evaluated-zero"),
        ("node4@iter4:EVAL2/1.0F1",),
    ),
]


def evaluations(job_dir: Path) -> dict[tuple[int, str], Any]:
    return dict(open_run(job_dir).evaluations)


def samples_of(job: FinishedJob) -> dict[tuple[int, str, int], set[int]]:
    """By evaluation and global batch what was read."""
    found: dict[tuple[int, str, int], set[int]] = {}
    for event in job.events("evaluation_samples"):
        key = (event["step"], event["kind"], event["batch"])
        found.setdefault(key, set()).update(event["samples"])
    return found


def test_a_standby_takes_part_in_an_evaluation_before_it_has_trained(
    scenarios: ScenarioRunner,
) -> None:
    job = scenarios.run(
        Shape(2, 1, num_steps=12, variant="evaluated"),
        "lazy",
        "node1@iter2:1.0B1",
        more_flags=("--eval-interval", "1"),
        num_standbys=1,
    )
    assert job.result.status == 0
    assert [node for node, _ in job.result.lost] == ["node1"], job.result.lost
    assert any("node2 takes stage 1 of pipeline 0" in line for line in job.result.lines)


def test_an_evaluation_changes_no_bit_of_the_training(scenarios: ScenarioRunner) -> None:
    evaluated, alone = (Shape(2, 2, variant=variant) for variant in ("evaluated", "in-parts"))
    comparison = compare_runs(scenarios.undisturbed(alone), scenarios.undisturbed(evaluated))
    assert comparison.equal, format_comparison(comparison)
    assert evaluations(scenarios.undisturbed(alone)) == {}
    assert sorted(evaluations(scenarios.undisturbed(evaluated))) == DUE


@pytest.mark.parametrize(
    ("shape", "injections"), several_in_ci(CASES, CASES[1], CASES[4], *CASES[7:]), ids=str
)
def test_a_loss_in_an_evaluation_changes_no_bit(
    scenarios: ScenarioRunner, shape: Shape, injections: Sequence[str]
) -> None:
    job = scenarios.run(shape, "lazy", *injections)
    undisturbed = scenarios.undisturbed(shape)
    assert evaluations(job.job_dir) == evaluations(undisturbed)
    assert len(evaluations(undisturbed)) == len(DUE)
    batch = shape.total_microbatches
    for (step, kind, number), samples in samples_of(job).items():
        first = 0 if kind == "test" else (step // 2 - (kind == "interval")) * 2
        assert samples == set(range((first + number) * batch, (first + number + 1) * batch))
    said = [line for line in job.result.lines if "validation loss at" in line]
    assert len(said) == len(DUE)
    victims = [injection.partition("@")[0] for injection in injections]
    assert scenarios.complaints(job, Expected(shape, "lazy", victims)) == []


def test_only_what_was_not_reported_is_done_again(scenarios: ScenarioRunner) -> None:
    job = scenarios.run(SHAPE, "lazy", "node3@iter4:EVAL2/1.0F1")
    begun = [e for e in job.events("evaluation_begun") if (e["step"], e["kind"]) == DUE[1]]
    again = {(e["pipeline"], e["first_batch"]) for e in begun if e["epoch"] == 1}
    # How far the other pipeline was is its own affair: it waits for this one at the end only.
    assert (1, 1) in again and again - {(1, 1)} <= {(0, 0), (0, 1), (0, 2)}
    assert len(again) <= 2
    assert scenarios.complaints(job, Expected(SHAPE, "lazy", ["node3"])) == []


def test_a_restart_evaluates_on_the_samples_that_come_next(
    scenarios: ScenarioRunner, tmp_path: Path
) -> None:
    save = ("--save", str(tmp_path / "save"), "--save-interval", "3")
    first = scenarios.run(SHAPE, "lazy", more_flags=save)
    assert first.result.status == 0, first.result.message
    load = ("--load", str(tmp_path / "save"), "--ckpt-step", "3")
    again = scenarios.run(SHAPE, "lazy", more_flags=load)
    assert again.result.status == 0, again.result.message
    expected = evaluations(scenarios.undisturbed(SHAPE))
    assert evaluations(first.job_dir) == expected
    assert evaluations(again.job_dir) == {key: expected[key] for key in DUE[1:]}


def test_evaluations_that_were_undone_are_done_again(
    scenarios: ScenarioRunner, tmp_path: Path
) -> None:
    """Both holders of a pipeline's stages die in an evaluation: all go back to step 3."""
    save = ("--save", str(tmp_path / "save"), "--save-interval", "3")
    injections = ("node2@iter6:EVAL1/0.0F1", "node3@iter6:EVAL1/1.0RECV_F0")
    job = scenarios.run(SHAPE, "lazy", *injections, more_flags=save)
    assert job.result.status == 0, job.result.message
    assert [(e["step"], e["undone_steps"]) for e in job.events("restored")] == [(3, 3)]
    found, expected = evaluations(job.job_dir), evaluations(scenarios.undisturbed(SHAPE))
    assert sorted(found) == sorted(expected)
    for key, losses in found.items():
        # One pipeline has all microbatches then, and sums them in another order.
        loss, undisturbed = (float.fromhex(one["lm loss"]) for one in (losses, expected[key]))
        assert loss == pytest.approx(undisturbed, rel=1e-4)
    again = [line for line in job.result.lines if "validation loss at iteration 4 |" in line]
    assert [line.endswith("done again |") for line in again] == [False, True]
