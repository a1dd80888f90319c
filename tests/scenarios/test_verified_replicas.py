"""A bit flips in one copy of the state: it is found, said, mended, and never taken over."""

from collections.abc import Sequence

import pytest
from evidence import Expected
from forked_jobs import FinishedJob
from in_ci import in_ci
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

pytestmark = pytest.mark.multiprocess

EVERY_STEP = ("--bamboo-verify-replicas", "1")
EVERY_OTHER = ("--bamboo-verify-replicas", "2")

ONE = Shape(2, 1, num_steps=4)
TWO = Shape(2, 2, num_steps=5)
ZERO = Shape(2, 2, num_steps=4, variant="zero-bf16")
SHARED = Shape(2, 2, 2, num_steps=4, num_chunks=2, tensor_size=2)

# By name: the job, its flags, what happens, and how the line begins that says what differs.
FOUND = {
    "a replica's parameter": (ONE, "lazy", EVERY_STEP,
        "node0@iter2:1RECV_REFRESH:flip:layer1/parameter",
        "before step 2 layer1 on node0, replica of stage 1 in pipeline"),
    "a replica's moment": (ONE, "eager", EVERY_OTHER,
        "node1@iter3:0RECV_REFRESH:flip:embedding/exp_avg",
        "before step 4 embedding on node1, replica of stage 0 in pipeline"),
    "in the last step": (ONE, "bubble", EVERY_STEP,
        "node0@iter4:1RECV_REFRESH:flip:head/exp_avg_sq",
        "before step 4 head on node0, replica of stage 1 in pipeline"),
    "a primary's moment": (TWO, "lazy", EVERY_STEP,
        "node1@iter2:1REDUCE:flip:layer1/exp_avg",
        "before step 2 layer1 on node1, primary of stage 1 in pipeline"),
    "a primary's parameter": (TWO, "eager", EVERY_OTHER,
        "node2@iter2:0REDUCE:flip:layer0/parameter",
        "before step 2 layer0 on node2, primary of stage 0 in pipeline"),
    "a shard's moment": (ZERO, "lazy", EVERY_STEP,
        "node0@iter2:1RECV_REFRESH:flip:layer1/exp_avg",
        "before step 2 layer1 on node0, replica of stage 1 in pipeline"),
    "a parameter that is gathered": (ZERO, "lazy", EVERY_STEP,
        "node3@iter3:1REDUCE:flip:layer1/parameter",
        "before step 3 layer1 on node3, primary of stage 1 in pipeline"),
    "chunks and shared layers": (SHARED, "bubble", EVERY_STEP,
        "node1@iter2:1REDUCE:flip:layer3/exp_avg",
        "before step 2 layer3 on node1, primary of stage 1 in pipeline"),
}  # fmt: skip


def said(job: FinishedJob) -> list[str]:
    """What differed, as the user was told it."""
    return [line.split("] ")[1] for line in job.result.lines if "] before step" in line]


@pytest.mark.parametrize(
    "name",
    in_ci(
        FOUND,
        "a replica's parameter",
        "a primary's moment",
        "a parameter that is gathered",
        "chunks and shared layers",
    ),
)
def test_a_copy_that_differs_is_mended(scenarios: ScenarioRunner, name: str) -> None:
    shape, redundancy, flags, injection, line = FOUND[name]
    job = scenarios.run(shape, redundancy, injection, more_flags=flags)
    assert job.result.status == 0, job.result.message
    (text,) = said(job)
    assert text.startswith(line)
    nobody_knows = shape.num_pipelines == 1 or "shard" in name
    assert ("nobody can say" in text) == nobody_knows
    assert [e["what"] for e in job.events("difference")] == [text.split(" ", 3)[3]]
    (mended,) = job.events("mended")
    assert mended["source"].startswith(injection.split("@")[0])
    assert scenarios.complaints(job, Expected(shape, redundancy, [])) == []


def test_of_two_copies_the_primarys_counts(scenarios: ScenarioRunner) -> None:
    """Nobody can say that it was the wrong one; but both are the same again."""
    flip = "node1@iter4:1REDUCE:flip:head/exp_avg_sq"
    job = scenarios.run(ONE, "lazy", flip, more_flags=EVERY_STEP)
    (text,) = said(job)
    assert "on node0, replica of stage 1" in text and "so it gets what node1 has" in text
    (text,) = scenarios.complaints(job, Expected(ONE, "lazy", []))
    copies = next(line.split() for line in text.splitlines() if line.startswith("copies"))
    assert copies[-1] == "0" and "DIFFERENT" in text


# By name: the job, a flip, a kill.
LOST = {
    "who gives it, before": ("node0@iter2:1RECV_REFRESH:flip:layer1/exp_avg", "node1@iter2:1MEND"),
    "who gives it, in the step": (
        "node0@iter2:1RECV_REFRESH:flip:layer1/exp_avg",
        "node1@iter2:1STEP",
    ),
    "who gives it, when others are ahead": (
        "node0@iter2:1RECV_REFRESH:flip:layer1/parameter",
        "node1@iter3:1.0RECV_F0",
    ),
    "who gets it, a primary": ("node1@iter2:1REDUCE:flip:layer1/exp_avg", "node0@iter2:1RMEND"),
    "another before the commit": (
        "node1@iter2:1REDUCE:flip:layer1/parameter",
        "node3@iter2:1VERIFY",
    ),
    "another at the commit": ("node0@iter2:1RECV_REFRESH:flip:head/exp_avg", "node2@iter2:0COMMIT"),
}


@pytest.mark.parametrize("name", in_ci(LOST, "who gives it, in the step", "who gets it, a primary"))
def test_a_loss_while_copies_are_mended_changes_no_bit(
    scenarios: ScenarioRunner, name: str
) -> None:
    flip, kill = LOST[name]
    job = scenarios.run(TWO, "lazy", flip, kill, more_flags=EVERY_STEP)
    assert len(said(job)) == 1 and job.events("mended")
    assert scenarios.complaints(job, Expected(TWO, "lazy", [kill.split("@")[0]])) == []


@pytest.mark.parametrize("variant", ["", "zero"])
def test_a_copy_that_differs_is_not_taken_over(scenarios: ScenarioRunner, variant: str) -> None:
    shape = Shape(2, 2 if variant else 1, num_steps=4, variant=variant)
    faults: Sequence[str] = ("node0@iter2:1RECV_REFRESH:flip:layer1/exp_avg", "node1@iter2:1MEND")
    job = scenarios.run(shape, "lazy", *faults, more_flags=EVERY_STEP)
    assert job.result.status == 1
    assert job.result.message.startswith(
        "stage 1 on node0 differed in layer1 (optimizer state) before step 2 from a copy that is"
    )
    assert not job.events("mended")


QUIET = {
    "shared layers": (SHARED, "eager", {}),
    "a standby joins, and steps are skipped": (
        Shape(3, 1, num_steps=40, variant="fp16"),
        "lazy",
        {"node3": "node1"},
    ),
    "a standby gets a shard": (
        Shape(2, 2, num_steps=40, variant="zero-bf16"),
        "lazy",
        {"node4": "node1"},
    ),
}


@pytest.mark.parametrize("name", in_ci(QUIET, "shared layers"))
def test_nothing_is_said_where_nothing_differs(scenarios: ScenarioRunner, name: str) -> None:
    shape, redundancy, joined = QUIET[name]
    job = scenarios.run(
        shape,
        redundancy,
        "node1@iter2:1.0B1",
        more_flags=EVERY_STEP,
        num_standbys=len(joined),
    )
    assert not said(job) and not job.events("mended")
    assert scenarios.complaints(job, Expected(shape, redundancy, ["node1"], joined)) == []
