"""Who computed what, from the event log: nothing is computed twice but what only a victim had."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forked_jobs import FinishedJob
from tiny_gpt import Shape

from megatron_bamboo.membership.workers import node_of, worker_name
from megatron_bamboo.schedule.actions import COMPUTE_OPS, Action, Op


@dataclass(frozen=True, slots=True)
class Moved:
    """A stage that was taken over, and when."""

    stage: int
    victim: str
    step: int
    must_redo: bool
    """Whether the victim's gradient of that step was lost with it."""
    covered: Mapping[int, int]
    """By chunk, the last microbatch in the mirror that the shadow went on from."""


# By node, operation, stage, chunk, microbatch.
Work = Counter[tuple[str, Op, int, int, int]]


def work_complaints(job: FinishedJob, shape: Shape, redundancy: str) -> list[str]:
    """Every forward and backward that was run too often, not at all, or by the wrong node.

    Workers of a node share layers, not work: each tensor rank's workers are judged by themselves.
    """
    actions, takeovers = job.events("action"), job.events("takeover")
    mirrors = job.events("mirror")
    applied = {(e["epoch"], e["step"]) for e in job.events("decision") if e["applied"]}
    found = []
    for tensor_rank in range(shape.tensor_size):
        works = _work_by_step(_of_rank(tensor_rank, shape.tensor_size, actions))
        own_mirrors = list(_of_rank(tensor_rank, shape.tensor_size, mirrors))
        own_takeovers = _of_rank(tensor_rank, shape.tensor_size, takeovers)
        moved = _moved_stages(own_takeovers, own_mirrors, applied)
        steps = range(1, shape.num_steps + 1)
        for pipeline, step in itertools.product(range(shape.num_pipelines), steps):
            view = _Step(shape, pipeline, step, redundancy, moved.get(pipeline, []))
            where = f"pipeline {pipeline}, step {step}"
            where += f", tensor rank {tensor_rank}" * (shape.tensor_size > 1)
            work = works.get((pipeline, step), Counter())
            found += [f"{where}: {text}" for text in view.complaints(work)]
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
        ran = {
            op: {node for node, *what in work if what == [op, stage, chunk, microbatch]}
            - self._gone()
            for op in COMPUTE_OPS
        }
        allowed = self._allowed(Action(stage, chunk, Op.RF, microbatch))
        if (ran[Op.F], ran[Op.B], ran[Op.RF]) not in allowed:
            what = ", ".join(f"{op} by {sorted(nodes)}" for op, nodes in sorted(ran.items()))
            yield f"stage {stage}, chunk {chunk}, microbatch {microbatch}: {what}"

    def _allowed(self, action: Action) -> list[tuple[set[str], set[str], set[str]]]:
        """Who may have run a microbatch's forward, its backward and its redundant forward."""
        stage, redundant = action.stage, self._redundant(action)
        move = next((move for move in self.moved if move.stage == stage), None)
        primary, shadow = self._node(stage), self._node(stage - 1)
        if move is None or move.step > self.step:
            return [({primary}, {primary}, redundant)]
        if move.step < self.step:
            return [({shadow}, {shadow}, set())]
        if not move.must_redo:
            return [(set(), set(), redundant)]
        assert action.chunk is not None and action.microbatch is not None
        if action.microbatch <= move.covered.get(action.chunk, -1):
            # By nobody who lives; a redundant forward need not be done any more.
            return [(set(), set(), redundant), (set(), set(), set())]
        # A redundant forward that was done is not done again.
        instead = [(set[str](), {shadow}, redundant)] if redundant else []
        return [({shadow}, {shadow}, set()), *instead]

    def _redundant(self, action: Action) -> set[str]:
        """Who is to run a redundant forward: the shadow if it lives and the schedule holds it."""
        schedule = self.shape.schedule(self.redundancy)
        rank = schedule.rank_of(action)
        if rank is None or action not in schedule.programs[rank]:
            return set()
        return {self._node(rank)} - self._gone()

    def _gone(self) -> set[str]:
        return {move.victim for move in self.moved if move.step <= self.step}

    def _node(self, stage: int) -> str:
        return self.shape.node(self.pipeline, stage % self.shape.num_stages)


def _of_rank(
    tensor_rank: int, tensor_size: int, events: Iterable[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """What the workers of one tensor rank said."""
    for event in events:
        if event["source"] == worker_name(node_of(event["source"]), tensor_rank, tensor_size):
            yield event


def _work_by_step(events: Iterable[dict[str, Any]]) -> Mapping[tuple[int, int], Work]:
    works: dict[tuple[int, int], Work] = {}
    for event in events:
        action = Action.parse(event["action"])
        if action.op not in COMPUTE_OPS:
            continue
        assert action.microbatch is not None and action.chunk is not None
        work = works.setdefault((event["pipeline"], event["step"]), Counter())
        node = node_of(event["source"])
        work[(node, action.op, action.stage, action.chunk, action.microbatch)] += 1
    return works


def _moved_stages(
    takeovers: Iterable[dict[str, Any]],
    mirrors: Sequence[dict[str, Any]],
    applied: Collection[tuple[int, int]],
) -> dict[int, list[Moved]]:
    """By pipeline, from what shadows and coordinator said."""
    moved: dict[int, list[Moved]] = {}
    for e in takeovers:
        must_redo = e["in_step"] and (e["epoch"], e["step"]) not in applied
        covered = {m["chunk"]: m["microbatch"] for m in mirrors if _is_of(m, e)}
        moved.setdefault(e["pipeline"], []).append(
            Moved(e["stage"], node_of(e["victim"]), e["step"], must_redo, covered)
        )
    return moved


def _is_of(mirror: dict[str, Any], takeover: dict[str, Any]) -> bool:
    return all(mirror[name] == takeover[name] for name in ("pipeline", "stage", "step", "epoch"))
