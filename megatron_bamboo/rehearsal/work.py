"""Who computed what, from the event log: nothing is computed twice but what only a victim had."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.membership.workers import node_of, worker_name
from megatron_bamboo.rehearsal.record import Event, Events
from megatron_bamboo.schedule.actions import COMPUTE_OPS, Action, Op
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.steady import steady_schedule
from megatron_bamboo.schedule.takeover import take_over


@dataclass(frozen=True, slots=True)
class Moved:
    """A stage that was taken over, and when."""

    stage: int
    victim: str
    step: int
    epoch: int
    must_redo: bool
    """Whether the victim's gradient of that step was lost with it."""
    covered: Mapping[int, int]
    """By chunk, the last microbatch in the mirror that the shadow went on from."""


@dataclass(frozen=True, slots=True)
class Changed:
    """How a pipeline was arranged anew: by a planned change from the step after this one on, or to
    begin this one anew."""

    step: int
    ranks: tuple[str, ...]
    stages: tuple[str, ...]
    replicas: tuple[str | None, ...]
    num_microbatches: int


class Work(Counter[tuple[str, Op, int, int, int]]):
    """How often what was done, by node, operation, stage, chunk and microbatch."""


def work_complaints(events: Events, shape: JobShape) -> list[str]:
    """Every forward and backward that was run too often, not at all, or by the wrong node.

    Workers of a node share layers, not work: each tensor rank's workers are judged by themselves.
    Of what was undone and done again only the last time is judged.
    """
    found, events = [], events.that_count()
    for tensor_rank in range(shape.tensor_size):
        own = _OfRank(events, tensor_rank, shape.tensor_size)
        for number in range(len(shape.arrangement.pipelines)):
            pipeline = _Pipeline(shape, number)
            moved = own.moved.get(number, [])
            changed = _changes(number, [*_restored(events), *events.of("changed")])
            begun = _begun_anew(number, events)
            # What is begun anew, where its stages are, is in the plan and in no takeover.
            moved = [move for move in moved if move.epoch not in begun]
            # A shadow may have taken over before it began any step.
            before = [move for move in moved if move.step <= shape.start_step]
            pipeline.go_on(before, [c for c in changed if c.step <= shape.start_step])
            for step in range(shape.start_step + 1, shape.train_iters + 1):
                lost_here = [move for move in moved if move.step == step]
                where = f"pipeline {number}, step {step}"
                where += f", tensor rank {tensor_rank}" * (shape.tensor_size > 1)
                anew = max((e for e, again in begun.items() if again.step == step), default=0)
                if anew:
                    pipeline.arrange(begun[anew])
                    lost_here = [move for move in lost_here if move.epoch > anew]
                work = own.work(number, step, anew)
                found += [f"{where}: {text}" for text in pipeline.complaints(work, lost_here)]
                pipeline.go_on(lost_here, [change for change in changed if change.step == step])
    return found


class _OfRank:
    """What the workers of one tensor rank did, and what they took over."""

    def __init__(self, events: Events, tensor_rank: int, tensor_size: int) -> None:
        def own(kind: str) -> list[Event]:
            return [
                event
                for event in events.of(kind)
                if event["source"]
                == worker_name(node_of(event["source"]), tensor_rank, tensor_size)
            ]

        applied = {(e["epoch"], e["step"]) for e in events.of("decision") if e["applied"]}
        self._works = _work_by_step(own("action"))
        self.moved = _moved_stages(own("takeover"), own("mirror"), applied)

    def work(self, pipeline: int, step: int, since: int) -> Work:
        """What a pipeline has computed of a step since an epoch, in which that was begun anew."""
        by_epoch = self._works.get((pipeline, step), {})
        return sum((work for epoch, work in by_epoch.items() if epoch >= since), Work())


class _Pipeline:
    """What one pipeline has to do, from step to step."""

    def __init__(self, shape: JobShape, number: int) -> None:
        pipelines = shape.arrangement.pipelines
        own = pipelines[number]
        self._sizes = (own.num_stages, own.num_chunks, own.num_microbatches)
        self._redundancy = Redundancy(shape.redundancy)
        self._costs = shape.costs_of(number)
        self._num_mirrors = shape.num_mirrors
        first = sum(pipeline.num_stages for pipeline in pipelines[:number])
        self._ranks = [f"node{first + stage}" for stage in range(own.num_stages)]
        self._schedule = lower(
            add_redundancy(
                compute_schedule(*self._sizes), self._redundancy, self._costs, shape.num_mirrors
            )
        )
        self._gone: set[str] = set()

    def arrange(self, changed: Changed) -> None:
        """Run whole steps as the pipeline is arranged from now on."""
        self._ranks = list(changed.ranks)
        self._sizes = (*self._sizes[:2], changed.num_microbatches)
        if not changed.num_microbatches:  # it has nothing to do
            return
        compute = compute_schedule(*self._sizes)
        placement = [self._ranks.index(node) for node in changed.stages]
        replicas = [None if n is None else self._ranks.index(n) for n in changed.replicas]
        self._schedule = steady_schedule(
            compute, placement, replicas, self._redundancy, self._costs, self._num_mirrors
        )

    def go_on(self, moves: Sequence[Moved], changes: Sequence[Changed]) -> None:
        """What follows from a step's losses and the change made in it."""
        if changes:
            self.arrange(changes[-1])
        for victim in dict.fromkeys(move.victim for move in moves):
            # It may have been a step ahead of the one in which its shadow took over.
            self._gone.add(victim)
            # A standby may have got its rank in that very step.
            rank = self._ranks.index(victim) if victim in self._ranks else None
            if rank is not None and self._schedule.stages_of(rank):
                self._schedule = take_over(self._schedule, rank, {})

    def complaints(self, work: Work, moves: Sequence[Moved]) -> Iterator[str]:
        for (node, op, stage, chunk, microbatch), times in work.items():
            if times > 1:
                yield f"{node} ran {stage}.{chunk}{op}{microbatch} {times} times"
        stages, chunks, microbatches = map(range, self._sizes)
        for stage, chunk, microbatch in itertools.product(stages, chunks, microbatches):
            yield from self._complain_about(stage, chunk, microbatch, work, moves)

    def _complain_about(
        self, stage: int, chunk: int, microbatch: int, work: Work, moves: Sequence[Moved]
    ) -> Iterator[str]:
        """Lost nodes count for nothing from the step of their loss on: what they alone had is
        to be done again, by the shadow alone."""
        gone = self._gone | {move.victim for move in moves}
        ran = {
            op: {node for node, *what in work if what == [op, stage, chunk, microbatch]} - gone
            for op in COMPUTE_OPS
        }
        action = Action(stage, chunk, Op.RF, microbatch)
        redundant = self._redundant(action) - gone
        # What a node got in this very step's change another had still run.
        primary = self._ranks[self._schedule.placement[stage]]
        move = next((m for m in moves if (m.stage, m.victim) == (stage, primary)), None)
        if (ran[Op.F], ran[Op.B], ran[Op.RF]) not in self._allowed(action, redundant, move):
            what = ", ".join(f"{op} by {sorted(nodes)}" for op, nodes in sorted(ran.items()))
            yield f"stage {stage}, chunk {chunk}, microbatch {microbatch}: {what}"

    def _allowed(
        self, action: Action, redundant: set[str], move: Moved | None
    ) -> list[tuple[set[str], set[str], set[str]]]:
        """Who may have run a microbatch's forward, its backward and its redundant forward."""
        if move is None:
            primary = self._ranks[self._schedule.placement[action.stage]]
            return [({primary}, {primary}, redundant)]
        if not move.must_redo:
            return [(set(), set(), redundant)]
        assert action.chunk is not None and action.microbatch is not None
        if action.microbatch <= move.covered.get(action.chunk, -1):
            # By nobody who lives; a redundant forward need not be done any more.
            return [(set(), set(), redundant), (set(), set(), set())]
        holder = self._schedule.replicas[action.stage]
        assert holder is not None, f"{action} was taken over without a replica"
        shadow = self._ranks[holder]
        # A redundant forward that was done is not done again.
        instead = [(set[str](), {shadow}, redundant)] if redundant else []
        return [({shadow}, {shadow}, set()), *instead]

    def _redundant(self, action: Action) -> set[str]:
        """Who is to run a redundant forward, if the schedule holds it."""
        rank = self._schedule.replicas[action.stage]
        if rank is None or action not in self._schedule.programs[rank]:
            return set()
        return {self._ranks[rank]}


def _changes(pipeline: int, events: Iterable[Event]) -> list[Changed]:
    """What the coordinator said that it had changed."""
    return [_changed(e["step"], e["pipelines"][pipeline]) for e in events]


def _restored(events: Events) -> list[Event]:
    """The plans by which all began again, as changes that were made in the step before."""
    plans = [e for e in events.of("plan") if e.get("restored") is not None]
    return [{**plan, "step": plan["restored"]} for plan in plans]


def _begun_anew(pipeline: int, events: Events) -> dict[int, Changed]:
    """By epoch the step that a pipeline began anew in it, and as what, unless it was undone."""
    backs = [(plan["epoch"], plan["step"]) for plan in _restored(events)]
    plans = [event for event in events.of("plan") if event.get("redone") is not None]
    return {
        e["epoch"]: _changed(e["redone"], e["pipelines"][pipeline])
        for e in plans
        if pipeline in e["redoing"]
        and not any(e["epoch"] < epoch and e["redone"] > step for epoch, step in backs)
    }


def _changed(step: int, fields: Mapping[str, Any]) -> Changed:
    arranged = {name: tuple(fields[name]) for name in ("ranks", "stages", "replicas")}
    return Changed(step, **arranged, num_microbatches=fields["shape"]["num_microbatches"])


def _work_by_step(events: Iterable[Event]) -> Mapping[tuple[int, int], Mapping[int, Work]]:
    """By pipeline and step, by the epoch in which it was done."""
    works: dict[tuple[int, int], dict[int, Work]] = {}
    for event in events:
        action = Action.parse(event["action"])
        if action.op not in COMPUTE_OPS:
            continue
        assert action.microbatch is not None and action.chunk is not None
        by_epoch = works.setdefault((event["pipeline"], event["step"]), {})
        work = by_epoch.setdefault(event["epoch"], Work())
        node = node_of(event["source"])
        work[(node, action.op, action.stage, action.chunk, action.microbatch)] += 1
    return works


def _moved_stages(
    takeovers: Iterable[Event],
    mirrors: Sequence[Event],
    applied: Collection[tuple[int, int]],
) -> dict[int, list[Moved]]:
    """By pipeline, from what shadows and coordinator said."""
    moved: dict[int, list[Moved]] = {}
    for e in takeovers:
        must_redo = e["in_step"] and (e["epoch"], e["step"]) not in applied
        covered = {m["chunk"]: m["microbatch"] for m in mirrors if _is_of(m, e)}
        moved.setdefault(e["pipeline"], []).append(
            Moved(e["stage"], node_of(e["victim"]), e["step"], e["epoch"], must_redo, covered)
        )
    return moved


def _is_of(mirror: Event, takeover: Event) -> bool:
    return all(mirror[name] == takeover[name] for name in ("pipeline", "stage", "step", "epoch"))
