"""Each check of a run sees what it is there for. Its work is judged in ``scenarios/evidence``."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.outcome import Status
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.rehearsal.invariants import ALWAYS, complaints
from megatron_bamboo.rehearsal.record import Events, RunRecord

SHAPE = JobShape(equal_pipelines(2, 1, 2), "lazy", train_iters=2, global_batch_size=2)
PIPELINE = {
    "stages": ["node0", "node1"],
    "replicas": ["node1", "node0"],
    "ranks": ["node0", "node1"],
    "shape": {"spans": [[0, 2], [2, 4]]},
}
Fields = dict[str, Any]


def event(kind: str, source: str = "coordinator", **fields: Any) -> Fields:
    return {"event": kind, "source": source, "time": 0.0, **fields}


def samples(step: int, microbatch: int, *numbers: int) -> Fields:
    place = {"step": step, "pipeline": 0, "microbatch": microbatch}
    return event("samples", "node0", **place, samples=list(numbers))


GOOD = [
    event("plan", epoch=0, digest="a", pipelines=[PIPELINE]),
    event("plan", "node0", epoch=0, digest="a"),
    *(samples(step, m, 2 * step - 2 + m) for step in (1, 2) for m in range(2)),
    samples(2, 1, 3),  # a shadow reads what its victim has read
    event("fault", "node1", fault="iter2:#3", how="kill"),
    event("loss", node="node1", cause="its connection closed"),
]
LINES = [f" [..] iteration        {step}/       2 | .." for step in (1, 2)]


def record(events: Sequence[Fields], lines: Sequence[str] = LINES, status: int = 0) -> RunRecord:
    return RunRecord(Path("job"), SHAPE, Events(events), status, lines)


def found(run: RunRecord) -> list[str]:
    return [text for check in ALWAYS for text in check(run)]


def test_a_good_run_has_no_complaints() -> None:
    assert found(record(GOOD)) == []


@pytest.mark.parametrize(
    ("events", "lines", "complaint"),
    [
        (GOOD, LINES[:1], "iteration lines of steps [1]"),
        (GOOD, LINES[:1] * 2 + LINES[1:], "iteration lines of steps [1, 1, 2]"),
        (GOOD, LINES[::-1], "iteration lines of steps [2, 1]"),
        ([*GOOD, samples(2, 1, 2)], LINES, "step 2, microbatch 1 of pipeline 0 was read as other"),
        ([*GOOD, samples(2, 2, 3)], LINES, "step 2 has samples [2, 3, 3]"),
        ([e for e in GOOD if e.get("step") != 2], LINES, "step 2 has samples []"),
        ([*GOOD, event("plan", "node0", epoch=0, digest="b")], LINES, "2 plans of epoch 0"),
        ([*GOOD, event("loss", node="node0", cause="")], LINES, "node0 was lost though nothing"),
        (GOOD[:-1], LINES, "node1 was struck (iter2:#3) and never counted as lost"),
    ],
)
def test_what_is_not_as_it_must_be(events: list[Fields], lines: list[str], complaint: str) -> None:
    assert any(complaint in text for text in found(record(events, lines)))


FLIPPED = [
    *GOOD,
    event("fault", "node0", fault="iter2:0VERIFY:flip:replica/exp_avg", how="flip", step=2),
    event("difference", step=2, what="layer1 on node0 ..."),
    event("mended", "node0", step=2),
]


def test_a_bit_that_flips_costs_no_node_and_is_mended() -> None:
    assert found(record(FLIPPED)) == []


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        (FLIPPED[:-1], "a bit flipped in node0 (iter2:0VERIFY:flip:replica/exp_avg) and was not"),
        ([*GOOD, *FLIPPED[-2:]], "before step 2 layer1 on node0 ..., though no bit flipped then"),
        ([*FLIPPED, event("loss", node="node0", cause="")], "node0 was lost though nothing"),
    ],
)
def test_a_flip_that_was_not_mended_and_a_difference_without_one(
    events: list[Fields], complaint: str
) -> None:
    (text,) = found(record(events))
    assert text.startswith(complaint)


def test_the_store_must_have_held_the_same_plans() -> None:
    assert found(replace(record(GOOD), plans={0: {"a"}})) == []
    assert found(replace(record(GOOD), plans={0: {"a", "b"}})) == ["there are 2 plans of epoch 0"]


def test_what_is_left_behind_is_named() -> None:
    assert found(replace(record(GOOD), left_behind=["python (17)"])) == ["left behind: python (17)"]


def test_giving_up_needs_a_stage_without_holder() -> None:
    lost_both = [*GOOD, event("fault", "node0", fault="", how=""), event("loss", node="node0")]
    assert complaints(record(lost_both, LINES[:1], Status.NO_HOLDER), Path("none")) == []
    (complaint,) = complaints(record(GOOD, LINES[:1], Status.NO_HOLDER), Path("none"))
    assert complaint.startswith("no stage had lost all its holders")


def three(first: int, *, stages: str = "012", replicas: str = "201") -> Fields:
    """A pipeline of three nodes, by their places in it."""
    nodes = {str(rank): f"node{first + rank}" for rank in range(3)} | {"-": None}
    return {
        "stages": [nodes[rank] for rank in stages],
        "replicas": [nodes[rank] for rank in replicas],
        "ranks": [nodes[rank] for rank in "012"],
        "shape": {"spans": [[0, 2], [2, 3], [3, 5]]},
    }


WHOLE = event("plan", epoch=0, digest="a", pipelines=[three(0), three(3)])
TAKEN = three(0, stages="222", replicas="---")
REPAIRED = event("plan", epoch=1, digest="b", pipelines=[TAKEN, three(3)], redone=2, time=1.0)


@pytest.mark.parametrize(
    ("plans", "lost", "num_shards", "complaint"),
    [
        ([WHOLE], (0, 1), 1, "others had all that was lost"),
        ([WHOLE], (0, 1), 2, None),
        ([WHOLE], (0, 1, 2), 1, None),
        ([WHOLE], (0, 1, 3, 4), 1, None),
        ([WHOLE], (0, 1, 3, 5), 1, "others had all that was lost"),
        # Nobody knows whether what was on its way has come.
        ([WHOLE, REPAIRED], (0, 1, 3, 4), 1, None),
        ([WHOLE, REPAIRED, {**REPAIRED, "redone": None}], (0, 1, 3, 4), 1, "others had all"),
        ([WHOLE, REPAIRED], (0, 1, 3), 1, "others had all that was lost"),
    ],
)
def test_giving_up_with_several_pipelines_needs_a_stage_that_no_one_has_or_can_take(
    plans: list[Fields], lost: tuple[int, ...], num_shards: int, complaint: str | None
) -> None:
    events = [*plans, *(event("loss", node=f"node{number}") for number in lost)]
    run = record(events, [], Status.NO_HOLDER)
    run = replace(run, shape=replace(SHAPE, num_shards=num_shards))
    ended = [text for text in complaints(run, Path("none")) if "was lost though" not in text]
    assert len(ended) == (complaint is not None)
    assert complaint is None or ended[0].startswith(complaint)


def test_a_failed_run_is_a_complaint() -> None:
    (complaint,) = complaints(record(GOOD, ["..", "it hung"], Status.FAILED), Path("none"))[-1:]
    assert complaint == "it ended with status 1: .. | it hung"
