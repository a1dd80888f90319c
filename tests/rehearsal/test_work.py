"""Who ran what: the judgement by an event log, here where nothing need be trained for it."""

from typing import Any

import pytest

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.rehearsal.record import Events
from megatron_bamboo.rehearsal.work import work_complaints

SHAPE = JobShape(equal_pipelines(2, 1, 1), "lazy", train_iters=2, global_batch_size=1)
Fields = dict[str, Any]


def ran(node: str, step: int, *actions: str, epoch: int = 0) -> list[Fields]:
    place = {"event": "action", "source": node, "time": 0.0, "pipeline": 0, "step": step}
    return [place | {"action": action, "epoch": epoch} for action in actions]


def taken_over(step: int, in_step: bool) -> Fields:
    """Stage 0, from node0 by node1."""
    place = {"stage": 0, "pipeline": 0, "step": step, "epoch": 1, "in_step": in_step}
    return {"event": "takeover", "source": "node1", "time": 0.0, "victim": "node0", **place}


BY_BOTH = [*ran("node0", 1, "0.0F0", "0.0B0"), *ran("node1", 1, "1.0F0", "1.0B0")]
ALONE = ("0.0F0", "1.0F0", "1.0B0", "0.0B0")


def test_without_losses_each_runs_its_own() -> None:
    second = [{**event, "step": 2} for event in BY_BOTH]
    assert work_complaints(Events([*BY_BOTH, *second]), SHAPE) == []


def test_of_what_was_undone_the_last_time_is_judged() -> None:
    """Both begin again from the beginning, and one is alone then."""
    arranged = {"ranks": ["node1", "-1"], "stages": ["node1"] * 2, "replicas": [None, None]}
    again = {**arranged, "shape": {"num_microbatches": 1}}
    plan = {"event": "plan", "epoch": 1, "restored": 0, "pipelines": [again]}
    back = {"event": "restored", "epoch": 1, "step": 0}
    before = [{**event, "epoch": 0} for event in BY_BOTH]
    after = [{**event, "epoch": 1} for n in (1, 2) for event in ran("node1", n, *ALONE)]
    assert work_complaints(Events([*before, back, plan, *after]), SHAPE) == []
    assert work_complaints(Events([*before, *after]), SHAPE) != []


@pytest.mark.parametrize(("step", "in_step"), [(0, False), (1, True)])
def test_a_shadow_runs_all_from_the_step_in_which_it_took_over(step: int, in_step: bool) -> None:
    """It may not have begun any step when a node is lost in the first one."""
    events = [taken_over(step, in_step), *ran("node1", 1, *ALONE), *ran("node1", 2, *ALONE)]
    assert work_complaints(Events(events), SHAPE) == []


def test_what_was_done_before_a_step_was_begun_anew_counts_for_nothing() -> None:
    alone = {"ranks": ["node0", "node1"], "stages": ["node1"] * 2, "replicas": [None] * 2}
    pipelines = [alone | {"shape": {"num_microbatches": 1}}]
    place = {"source": "coordinator", "time": 0.0, "epoch": 1, "redone": 1, "redoing": [0]}
    repaired = {"event": "plan", **place, "pipelines": pipelines}
    second = ran("node1", 2, *ALONE, epoch=1)
    events = [repaired, taken_over(1, True), *BY_BOTH, *ran("node1", 1, *ALONE, epoch=1), *second]
    assert work_complaints(Events(events), SHAPE) == []
    (complaint,) = work_complaints(Events([*events, *ran("node1", 1, "0.0F0", epoch=1)]), SHAPE)
    assert complaint == "pipeline 0, step 1: node1 ran 0.0F0 2 times"


def test_what_nobody_ran_is_seen() -> None:
    events = [taken_over(0, False), *ran("node1", 1, *ALONE), *ran("node1", 2, *ALONE[:3])]
    (complaint,) = work_complaints(Events(events), SHAPE)
    assert complaint.startswith("pipeline 0, step 2: stage 0, chunk 0, microbatch 0: B by []")
