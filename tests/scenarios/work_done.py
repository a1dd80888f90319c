"""Who computed what, from the event log: nothing is computed twice but what only a victim had."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from forked_jobs import FinishedJob
from tiny_gpt import Shape

from megatron_bamboo.membership.workers import node_of
from megatron_bamboo.schedule.actions import COMPUTE_OPS, Action, Op


@dataclass(frozen=True, slots=True)
class Moved:
    """A stage that was taken over, and when."""

    stage: int
    victim: str
    step: int
    must_redo: bool
    """Whether the victim's gradient of that step was lost with it."""


# By node, operation, stage, chunk, microbatch. What one worker of a node does all of them do.
Work = Counter[tuple[str, Op, int, int, int]]


def work_complaints(
    job: FinishedJob, shape: Shape, redundancy: str, victims: frozenset[str]
) -> list[str]:
    """Every forward and backward that was run too often, not at all, or by the wrong node."""
    works = _work_by_step(job)
    moved = _moved_stages(job)
    found = []
    for pipeline in range(shape.num_pipelines):
        for step in range(1, shape.num_steps + 1):
            work = works.get((pipeline, step), Counter())
            where = f"pipeline {pipeline}, step {step}: "
            view = _Step(shape, pipeline, step, redundancy, moved.get(pipeline, []))
            found += [where + text for text in view.complaints(work)]
    return found


@dataclass(frozen=True, slots=True)
class _Step:
    """What one pipeline has to do in one step."""

    shape: Shape
    pipeline: int
    step: int
    redundancy: str
    moved: list[Moved]

    def complaints(self, work: Work) -> Iterator[str]:
        for (node, op, stage, chunk, microbatch), times in work.items():
            if times > 1:
                yield f"{node} ran {stage}.{chunk}{op}{microbatch} {times} times"
        sizes = (self.shape.num_stages, self.shape.num_chunks, self.shape.num_microbatches)
        for stage, chunk, microbatch in itertools.product(*map(range, sizes)):
            yield from self._complain_about(stage, chunk, microbatch, work)

    def _complain_about(self, stage: int, chunk: int, microbatch: int, work: Work) -> Iterator[str]:
        """Lost nodes count for nothing from the step of their loss on: what they alone had is
        to be done again, by the shadow alone."""
        gone = {move.victim for move in self.moved if move.step <= self.step}
        ran = {
            op: {node for node, *what in work if what == [op, stage, chunk, microbatch]} - gone
            for op in COMPUTE_OPS
        }
        move = next((move for move in self.moved if move.stage == stage), None)
        primary, shadow = self._node(stage), self._node(stage - 1)
        if move is None or move.step > self.step:
            allowed = [({primary}, {primary}, ran[Op.RF])]
        elif move.step < self.step:
            allowed = [({shadow}, {shadow}, set())]
        elif move.must_redo:
            # A redundant forward that was done is not done again.
            allowed = [({shadow}, {shadow}, set()), (set(), {shadow}, {shadow})]
        else:
            allowed = [(set(), set(), ran[Op.RF])]
        if (ran[Op.F], ran[Op.B], ran[Op.RF]) not in allowed:
            what = ", ".join(f"{op} by {sorted(nodes)}" for op, nodes in sorted(ran.items()))
            yield f"stage {stage}, microbatch {microbatch}: {what}"
        yield from self._complain_about_redundancy(stage, microbatch, ran[Op.RF])

    def _complain_about_redundancy(
        self, stage: int, microbatch: int, by: set[str]
    ) -> Iterator[str]:
        shadow = self._node(stage - 1)
        touched = any(
            move.step <= self.step and move.stage in (stage, (stage - 1) % self.shape.num_stages)
            for move in self.moved
        )
        allowed = {shadow} if self.redundancy in ("eager", "bubble") else set()
        some_may_lack = touched or self.redundancy == "bubble"  # where no gap holds it
        if not by <= allowed or (by != allowed and not some_may_lack):
            yield f"redundant forward of stage {stage}, microbatch {microbatch} by {sorted(by)}"

    def _node(self, stage: int) -> str:
        return self.shape.node(self.pipeline, stage % self.shape.num_stages)


def _work_by_step(job: FinishedJob) -> Mapping[tuple[int, int], Work]:
    works: dict[tuple[int, int], Work] = {}
    is_shared = job.request.workers_per_node > 1
    for event in job.events("action"):
        action = Action.parse(event["action"])
        if action.op not in COMPUTE_OPS or not event["source"].endswith(("", ":0")[is_shared]):
            continue
        assert action.microbatch is not None and action.chunk is not None
        work = works.setdefault((event["pipeline"], event["step"]), Counter())
        node = node_of(event["source"])
        work[(node, action.op, action.stage, action.chunk, action.microbatch)] += 1
    return works


def _moved_stages(job: FinishedJob) -> dict[int, list[Moved]]:
    """By pipeline, from what shadows and coordinator said."""
    applied = {(e["epoch"], e["step"]) for e in job.events("decision") if e["applied"]}
    moved: dict[int, list[Moved]] = {}
    for e in job.events("takeover"):
        must_redo = e["in_step"] and (e["epoch"], e["step"]) not in applied
        moved.setdefault(e["pipeline"], []).append(
            Moved(e["stage"], node_of(e["victim"]), e["step"], must_redo)
        )
    return moved
