"""Pipelines that are cut apart, with microbatches of their own number, train as one model.

Beside an equal run of the same batches only the order of sums differs. A loss changes no bit
against an undisturbed run of the same unequal pipelines.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from evidence import Expected
from in_ci import in_ci
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.observe.compare import compare_runs, format_comparison
from megatron_bamboo.observe.events import read_events
from megatron_bamboo.observe.saved_run import open_run

pytestmark = pytest.mark.multiprocess

# No stage of one begins and ends where one of the other does.
CUTS = ((1, 2, 1), (2, 2))
SHARES = (5, 3)
# With Adam's usual epsilon gradients that are nothing but rounding would make whole steps.
FLAGS = ("--adam-eps", "1e-3")

UNEQUAL = Shape.unequal(CUTS, SHARES, num_steps=4)
EQUAL = Shape(2, 2, 4, num_steps=4, num_layers=4)
VARIANTS = {
    "dropout": (UNEQUAL, EQUAL, ()),
    "no dropout, untied": (
        replace(UNEQUAL, variant="untied-rope"),
        replace(EQUAL, variant="untied-rope"),
        ("--attention-dropout", "0", "--hidden-dropout", "0"),
    ),
    "a shared optimizer, and shared layers": (
        replace(UNEQUAL, variant="zero", tensor_size=2),
        replace(EQUAL, variant="zero", tensor_size=2),
        (),
    ),
}


def numbers(values: tuple[str, str]) -> list[float]:
    return [float.fromhex(value) for value in values]


@pytest.mark.parametrize(
    "name", in_ci(VARIANTS, "dropout", "a shared optimizer, and shared layers")
)
def test_only_rounding_differs_from_equal_pipelines(scenarios: ScenarioRunner, name: str) -> None:
    """Losses, norms, parameters and moments: each microbatch counts 1/total."""
    *shapes, flags = VARIANTS[name]
    jobs = [scenarios.run(shape, "lazy", more_flags=(*FLAGS, *flags)) for shape in shapes]
    assert [job.result.status for job in jobs] == [0, 0], jobs[0].result.message
    unequal, equal = (open_run(job.job_dir) for job in jobs)
    for step, values in unequal.losses.items():
        assert numbers(values) == pytest.approx(numbers(equal.losses[step]), rel=1e-6), step
    comparison = compare_runs(*(job.job_dir for job in jobs))
    assert not comparison.copies, format_comparison(comparison)
    assert comparison.num_tensors > 100
    assert all(d.max_abs < 1e-6 for d in comparison.tensors), format_comparison(comparison)


def test_each_pipeline_reads_its_own_part_of_each_batch(scenarios: ScenarioRunner) -> None:
    """As global microbatches are dealt out, to who has some left to get."""
    events = read_events(scenarios.undisturbed(UNEQUAL) / "events")
    read = {(e["pipeline"], *e["samples"]) for e in events if e["event"] == "samples"}
    first = sorted((samples, pipeline) for pipeline, samples in read if samples < 8)
    assert [pipeline for _, pipeline in first] == [0, 1, 0, 1, 0, 1, 0, 0]


KILLS = {
    "in a forward of the longer one": (UNEQUAL, "eager", ("node1@iter2:1.0F3",)),
    "in a backward of the shorter one": (UNEQUAL, "lazy", ("node4@iter2:1.0B1",)),
    "the last stage, in the reduction": (UNEQUAL, "bubble", ("node2@iter2:2REDUCE",)),
    # Its shadow runs the first stage and the last one then.
    "the first stage, in the reduction": (UNEQUAL, "lazy", ("node0@iter2:0REDUCE",)),
    "at the commit": (UNEQUAL, "lazy", ("node3@iter2:0COMMIT",)),
    "one in each": (UNEQUAL, "eager", ("node1@iter2:1.0B2", "node3@iter2:0.0F1")),
    "in a gather": (replace(UNEQUAL, variant="zero"), "lazy", ("node1@iter2:1GATHER",)),
    "in the gather that is run again": (
        replace(UNEQUAL, variant="zero-verify"),
        "eager",
        ("node4@iter2:1GATHER", "node2@iter3:2.0F0"),
    ),
    "with mirrors and shared layers": (
        replace(UNEQUAL, variant="bf16", tensor_size=2, num_mirrors=2),
        "lazy",
        ("node2@iter2:2.0B4",),
    ),
}


@pytest.mark.parametrize(
    "name",
    in_ci(
        KILLS,
        "the last stage, in the reduction",
        "one in each",
        "in the gather that is run again",
        "with mirrors and shared layers",
    ),
)
def test_a_loss_changes_no_bit(scenarios: ScenarioRunner, name: str) -> None:
    shape, redundancy, injections = KILLS[name]
    victims = [injection.partition("@")[0] for injection in injections]
    assert scenarios.survive(shape, redundancy, victims, *injections) == []


def test_a_standby_takes_a_place_in_either(scenarios: ScenarioRunner) -> None:
    shape = Shape.unequal(CUTS, SHARES, num_steps=30, variant="zero")
    injections = ("node1@iter2:1.0B1", "node4@iter3:1.0F0")
    job = scenarios.run(shape, "lazy", *injections, num_standbys=2)
    expected = Expected(shape, "lazy", ["node1", "node4"], {"node5": "node1", "node6": "node4"})
    assert scenarios.complaints(job, expected) == []


def test_copies_are_compared_and_mended_across_the_cuts(scenarios: ScenarioRunner) -> None:
    """Layer 2 shares its stage with layer 1 in one pipeline, and with layer 3 in the other."""
    shape = replace(UNEQUAL, variant="verify")
    job = scenarios.run(shape, "lazy", "node1@iter2:1REDUCE:flip:layer2/parameter")
    (mended,) = job.events("mended")
    assert (mended["source"], mended["unit"], mended["stage"]) == ("node1", "layer2", 1)
    assert scenarios.complaints(job, Expected(shape, "lazy", [])) == []


@pytest.mark.parametrize(
    ("saving", "going_on"),
    [(replace(UNEQUAL, variant="zero"), replace(EQUAL, variant="zero")), (EQUAL, UNEQUAL)],
    ids=["to equal ones", "to unequal ones"],
)
def test_a_checkpoint_does_not_tell_how_pipelines_were_cut(
    scenarios: ScenarioRunner, tmp_path: Path, saving: Shape, going_on: Shape
) -> None:
    """A microbatch's loss has the same bits in any cut, so the first one shows the weights' bits;
    what follows shows the moments, but for rounding."""
    root = tmp_path / "save"
    save = ("--save", str(root), "--save-interval", "2")
    jobs = [scenarios.run(saving, "lazy", more_flags=(*FLAGS, *save))]
    load = ("--load", str(root), "--ckpt-step", "2")
    jobs += [scenarios.run(going_on, "lazy", more_flags=(*FLAGS, *load))]
    assert [job.result.status for job in jobs] == [0, 0], jobs[-1].result.message
    before, after = (open_run(job.job_dir).losses for job in jobs)
    assert list(after) == [3, 4]
    assert after[3][0] == before[3][0]
    for step, values in after.items():
        assert numbers(values) == pytest.approx(numbers(before[step]), rel=1e-6), step
    comparison = compare_runs(*(job.job_dir for job in jobs))
    assert all(d.max_abs < 1e-6 for d in comparison.tensors), format_comparison(comparison)
