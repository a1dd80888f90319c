"""The pipelines share the optimizer's state: no bit differs from each having all of it.

A loss in the gather of parameters costs nothing but the gather: all have stepped their share, the
shadow its victim's.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from in_ci import in_ci, several_in_ci
from moments import Moment, moments_of
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.checkpoint.moments import SaveMoment
from megatron_bamboo.observe.compare import compare_runs, format_comparison

pytestmark = pytest.mark.multiprocess

TWO = Shape(2, 2, num_steps=4, variant="zero")
THREE = Shape(2, 3, num_steps=4, variant="zero")
FOUR_STAGES = Shape(4, 2, num_steps=4, variant="zero")

CASES = {
    # Whoever is not of the victim's gathers has begun the next step, and gathers once more.
    "the others are ahead": (FOUR_STAGES, ("node5@iter2:2RGATHER",)),
    "two in one gather": (THREE, ("node1@iter2:1GATHER", "node2@iter2:0GATHER")),
    "in the gather that is run again": (THREE, ("node1@iter2:1GATHER", "node4@iter3:0.0F0")),
    "in the last gather": (TWO, ("node0@iter4:0GATHER",)),
    "in the last gather of another": (FOUR_STAGES, ("node2@iter4:3RGATHER",)),
    "in the first step and its gather": (THREE, ("node0@iter1:0.0B2", "node3@iter1:1GATHER")),
    "in a step with two stages": (TWO, ("node1@iter2:1.0B1", "node2@iter3:0GATHER")),
    "shared layers": (
        Shape(2, 2, 2, num_steps=4, variant="zero", tensor_size=2),
        ("node3@iter2:1GATHER",),
    ),
    "chunks": (
        Shape(2, 2, 3, num_steps=4, variant="zero", num_chunks=2),
        ("node0@iter2:1RGATHER",),
    ),
    "a skipped step": (
        Shape(2, 2, num_steps=7, variant="zero-fp16"),
        ("node1@iter1:1GATHER", "node2@iter5:0STEP"),
    ),
    "with mirrors": (
        Shape(2, 2, num_steps=4, variant="zero", num_mirrors=2),
        ("node1@iter2:1.0B3", "node2@iter3:0GATHER"),
    ),
    "one pipeline": (Shape(2, 1, num_steps=4, variant="zero"), ("node0@iter2:0STEP",)),
}


@pytest.mark.parametrize(
    ("variant", "plain"),
    several_in_ci(
        [("zero", ""), ("zero-bf16", "bf16"), ("zero-fp16", "fp16")], ("zero-bf16", "bf16")
    ),
)
def test_no_bit_differs_from_each_pipeline_having_all(
    scenarios: ScenarioRunner, variant: str, plain: str
) -> None:
    sharing, alone = (Shape(2, 3, num_steps=4, variant=name) for name in (variant, plain))
    comparison = compare_runs(scenarios.undisturbed(alone), scenarios.undisturbed(sharing))
    assert comparison.equal, format_comparison(comparison)
    assert scenarios.survive(sharing, "lazy", []) == []


@pytest.mark.parametrize("moment", moments_of("ci-tail"), ids=str)
def test_a_loss_after_the_reduction_changes_no_bit(
    scenarios: ScenarioRunner, moment: Moment
) -> None:
    assert scenarios.survive_moment(moment) == []


@pytest.mark.parametrize(
    "name",
    in_ci(
        CASES,
        "the others are ahead",
        "in the gather that is run again",
        "shared layers",
        "a skipped step",
    ),
)
def test_losses_around_a_gather_change_no_bit(scenarios: ScenarioRunner, name: str) -> None:
    shape, injections = CASES[name]
    victims = [injection.partition("@")[0] for injection in injections]
    assert scenarios.survive(shape, "lazy", victims, *injections) == []


@pytest.mark.parametrize(
    ("before", "after"),
    several_in_ci([("zero", ""), ("", "zero"), ("zero", "zero")], ("zero", "zero")),
)
def test_a_checkpoint_does_not_tell_who_shared_what(
    scenarios: ScenarioRunner, tmp_path: Path, before: str, after: str
) -> None:
    """It is also the same if one that writes only its share dies while it writes."""
    saving, going_on = (Shape(2, 2, num_steps=4, variant=name) for name in (before, after))
    flags, victim = ("--save", str(tmp_path / "save"), "--save-interval", "2"), "node1"
    injections = (f"{victim}@iter2:{SaveMoment.WRITE}",) if before else ()
    job = scenarios.run(saving, "lazy", *injections, more_flags=flags)
    assert job.result.status == 0, job.result.message
    load = ("--load", str(tmp_path / "save"), "--ckpt-step", "2")
    job = scenarios.run(going_on, "lazy", f"{victim}@iter3:1.0B1", more_flags=load)
    assert job.result.status == 0, job.result.message
    comparison = compare_runs(scenarios.undisturbed(replace(TWO, variant="")), job.job_dir)
    assert comparison.equal and comparison.num_losses == 2, format_comparison(comparison)
