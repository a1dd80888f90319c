"""After losses a job is made whole: by new shadows, or by standbys in the place of victims.

What is held at the end, whoever has computed it, is bit for bit what an undisturbed run holds; the
evidence asks for every holder's copy.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from evidence import Expected
from in_ci import in_ci
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.observe.compare import compare_runs, format_comparison

pytestmark = pytest.mark.multiprocess

# Long enough for what is planned after a loss to be made before the next.
ONE = Shape(3, 1, num_steps=30)
TWO = Shape(3, 2, num_steps=30)
FOUR = Shape(4, 1, num_steps=40)
SHARED = Shape(3, 1, num_steps=30, num_chunks=2, tensor_size=2)
HALF = Shape(3, 1, num_steps=30, variant="bf16")
SCALED = Shape(3, 1, num_steps=30, variant="fp16")
SKIPPING = Shape(3, 1, num_steps=30, variant="all-skipped")
# Pipelines that share the optimizer's state.
SHARING = Shape(3, 2, num_steps=30, variant="zero")
SHARING_HALF = Shape(3, 2, num_steps=30, variant="zero-bf16")

SHADOWED = {
    "a shadow's victim and then the shadow": (
        FOUR,
        "eager",
        ("node2@iter2:2.0B1", "node1@iter14:1.0F2", "node0@iter27:2.0B2"),
    ),
    "the last of two": (FOUR, "lazy", ("node0@iter2:0.0F1", "node3@iter16:0.0B3")),
    "in two pipelines": (TWO, "bubble", ("node1@iter2:1.0B1", "node4@iter2:1.0B1")),
    "with chunks and shared layers": (
        SHARED,
        "bubble",
        ("node1@iter2:1.1B1", "node0@iter16:1.0F1"),
    ),
    "in half precision": (HALF, "eager", ("node1@iter2:1.0B1", "node0@iter16:1.0F1")),
    "while steps are skipped": (SCALED, "lazy", ("node1@iter2:1.0B1", "node0@iter16:1.0F1")),
    "with a share of the optimizer": (
        SHARING,
        "bubble",
        ("node4@iter2:1.0B1", "node3@iter16:1GATHER"),
    ),
}


def lost(injections: Sequence[str]) -> list[str]:
    return [injection.split("@")[0] for injection in injections]


@pytest.mark.parametrize(
    "name",
    in_ci(
        SHADOWED,
        "a shadow's victim and then the shadow",
        "with a share of the optimizer",
    ),
)
def test_new_shadows_survive_the_next_loss(scenarios: ScenarioRunner, name: str) -> None:
    shape, redundancy, injections = SHADOWED[name]
    job = scenarios.run(shape, redundancy, *injections)
    expected = Expected(shape, redundancy, lost(injections), knows_takeovers=False)
    assert scenarios.complaints(job, expected) == []


STANDBYS = {
    "a first stage": (ONE, "lazy", ["node0@iter2:0.0B1"], {"node3": "node0"}),
    "a last stage": (ONE, "bubble", ["node2@iter2:2.0F1"], {"node3": "node2"}),
    "in one of two pipelines": (TWO, "eager", ["node4@iter3:1.0B0"], {"node6": "node4"}),
    "one in each pipeline": (
        TWO,
        "eager",
        ["node1@iter2:1.0B1", "node5@iter2:2.0F3"],
        {"node6": "node1", "node7": "node5"},
    ),
    "the standby is lost too": (
        ONE,
        "lazy",
        ["node1@iter2:1.0B1", "node3@iter18:1.0B2"],
        {"node3": "node1", "node4": "node3"},
    ),
    "with chunks and shared layers": (SHARED, "eager", ["node1@iter2:1.1B1"], {"node3": "node1"}),
    "in half precision": (HALF, "lazy", ["node1@iter2:1.0B1"], {"node3": "node1"}),
    "while steps are skipped": (SCALED, "eager", ["node1@iter2:1.0B1"], {"node3": "node1"}),
    "with a share of the optimizer": (
        SHARING,
        "lazy",
        ["node1@iter2:1GATHER"],
        {"node6": "node1"},
    ),
    "with a share of it in half precision": (
        SHARING_HALF,
        "eager",
        ["node1@iter2:1.0B1", "node5@iter2:2.0F3"],
        {"node6": "node1", "node7": "node5"},
    ),
    # Moments that nobody has made yet are as good as zeros.
    "where no step is applied": (SKIPPING, "eager", ["node1@iter2:1.0B2"], {"node3": "node1"}),
}


@pytest.mark.parametrize(
    "name",
    in_ci(
        STANDBYS,
        "one in each pipeline",
        "the standby is lost too",
        "with a share of it in half precision",
    ),
)
def test_a_standby_takes_the_place_of_a_victim(scenarios: ScenarioRunner, name: str) -> None:
    shape, redundancy, injections, joined = STANDBYS[name]
    job = scenarios.run(shape, redundancy, *injections, num_standbys=len(joined))
    assert scenarios.complaints(job, Expected(shape, redundancy, lost(injections), joined)) == []


def test_standbys_that_are_not_needed_change_nothing(scenarios: ScenarioRunner) -> None:
    job = scenarios.run(ONE, "lazy", num_standbys=2)
    assert scenarios.complaints(job, Expected(ONE, "lazy", ())) == []


def test_a_checkpoint_of_the_step_in_which_state_moved(
    scenarios: ScenarioRunner, tmp_path: Path
) -> None:
    """The standby writes its share of it, which it has had for no step yet."""
    shape, root = Shape(2, 2, num_steps=16, variant="zero-bf16"), tmp_path / "save"
    flags = ("--save", str(root), "--save-interval", "1")
    job = scenarios.run(shape, "lazy", "node1@iter2:1.0B1", more_flags=flags, num_standbys=1)
    assert job.result.status == 0, job.result.message
    (change,) = job.events("changed")
    saved = {event["step"]: event["failure"] for event in job.events("saved")}
    assert saved[change["step"]] is None
    assert "node4" in {e["source"] for e in job.events("saved") if e["step"] == change["step"]}
    load = ("--load", str(root), "--ckpt-step", str(change["step"]))
    again = scenarios.run(shape, "lazy", more_flags=load)
    assert again.result.status == 0, again.result.message
    comparison = compare_runs(scenarios.undisturbed(shape), again.job_dir)
    assert comparison.equal, format_comparison(comparison)
