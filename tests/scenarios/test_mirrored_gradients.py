"""Late losses with mirrors: what these cover is not run again, and the bits are the same.

That the work of each microbatch was done by whom it had to be is in every job's evidence; here is
that mirrors are used at all, wherever they can be.
"""

from collections.abc import Sequence

import pytest
from evidence import Expected
from forked_jobs import FinishedJob
from in_ci import in_ci
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.schedule.actions import Action, Op

pytestmark = pytest.mark.multiprocess

LATE = {
    "one pipeline": (Shape(3, 1, num_mirrors=3), "lazy", ("node1@iter2:1.0B3",)),
    "the first stage": (Shape(3, 2, num_mirrors=2), "eager", ("node3@iter2:0.0B3",)),
    "the last stage, whose losses are known": (
        Shape(3, 2, num_mirrors=3),
        "lazy",
        ("node5@iter2:2.0SEND_B3",),
    ),
    "two chunks": (
        Shape(3, 1, num_steps=4, num_chunks=2, num_mirrors=2),
        "bubble",
        ("node1@iter2:1.0B3",),
    ),
    "two workers a node": (
        Shape(3, 1, num_steps=4, num_chunks=2, tensor_size=2, num_mirrors=2),
        "eager",
        ("node2@iter2:2.0B3",),
    ),
    "half precision": (Shape(3, 1, num_mirrors=3, variant="bf16"), "lazy", ("node1@iter2:1.0B3",)),
    "a shared optimizer": (
        Shape(3, 2, num_steps=4, variant="zero", num_mirrors=2),
        "lazy",
        ("node4@iter2:1.0B3",),
    ),
    "two stages of one pipeline": (
        Shape(4, 1, num_mirrors=3),
        "lazy",
        ("node1@iter2:1.0B3", "node3@iter2:3.0B3"),
    ),
    "one after another": (
        Shape(3, 2, num_mirrors=3),
        "eager",
        ("node2@iter2:2.0B3", "node3@iter4:0.0B3"),
    ),
}


@pytest.mark.parametrize("name", in_ci(LATE, *list(LATE)[::2]))
def test_only_what_no_mirror_holds_runs_again(scenarios: ScenarioRunner, name: str) -> None:
    shape, redundancy, injections = LATE[name]
    victims = [injection.split("@")[0] for injection in injections]
    job = scenarios.run(shape, redundancy, *injections)
    used = {(e["pipeline"], e["step"], e["stage"]) for e in job.events("mirror")}
    for injection, victim in zip(injections, victims, strict=True):
        pipeline, stage = shape.place(victim)
        step = int(injection.split("iter")[1].split(":")[0])
        assert (pipeline, step, stage) in used
        assert redone(job, pipeline, step, stage) < shape.num_chunks * shape.num_microbatches
    assert scenarios.complaints(job, Expected(shape, redundancy, victims)) == []


def redone(job: FinishedJob, pipeline: int, step: int, stage: int) -> int:
    """How many of a stage's backward passes another node than its first one ran."""
    own = job.request.workers_per_node
    first = f"node{pipeline * _num_stages(job) + stage}"
    again = [
        event
        for event in job.events("action")
        if (event["pipeline"], event["step"]) == (pipeline, step)
        and not event["source"].startswith(first)
        and _is_backward_of(event["action"], stage)
    ]
    return len(again) // own


def _num_stages(job: FinishedJob) -> int:
    flags: Sequence[str] = job.request.flags
    return int(flags[flags.index("--pipeline-model-parallel-size") + 1])


def _is_backward_of(text: str, stage: int) -> bool:
    action = Action.parse(text)
    return (action.op, action.stage) == (Op.B, stage)
