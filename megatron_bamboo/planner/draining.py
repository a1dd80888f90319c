"""What lets live nodes go: a planned change after which they are in no place.

A node that is to be taken is still there, so nothing has to be redone: its stage moves as any state
moves, by a holder that is in sync when a step has passed. Most often that is its shadow, which has
the stage's state already; a stage without a replica first moves to the nearest node that stays. A
standby that is ready takes the place itself, so that no node ever runs two stages. Otherwise one
takes the place later that has become vacant, as after a loss.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from megatron_bamboo.membership.decision import Fenced, Record, StepDecision
from megatron_bamboo.membership.workers import node_of
from megatron_bamboo.planner.healing import (
    Vacancy,
    first_open_step,
    in_place,
    next_plan,
    protected,
    transfers_between,
    transfers_reason,
)
from megatron_bamboo.planner.plan import Change, PipelinePlan, Plan
from megatron_bamboo.planner.rebalancing import Balance

Replacing = Sequence[tuple[Vacancy, str]]
"""Standbys that are ready, and the places of leaving nodes that they take."""


def place_of(plan: Plan, node: str) -> Vacancy:
    """The place of a node that runs some stage."""
    number = plan.pipeline_of(node)
    return Vacancy(number, plan.pipelines[number].rank_of(node))


def can_go(plan: Plan, leaving: Sequence[str], replacing: Replacing = ()) -> tuple[str, ...]:
    """Those who can be let go by one change.

    Of a pipeline all nodes of which are leaving one must stay until a standby has come.

    Args:
        leaving: the nodes that are to go, the most urgent ones first.
        replacing: the standbys that come with this very change.
    """
    staying, renewed = set(), {place.pipeline for place, _ in replacing}
    for number, pipeline in enumerate(plan.pipelines):
        running = [node for node in leaving if node in pipeline.stages]
        if number not in renewed and running and set(pipeline.stages) <= set(running):
            staying.add(running[-1])
    live = {node for pipeline in plan.pipelines for node in pipeline.stages}
    return tuple(node for node in leaving if node in live - staying)


def drain(
    plan: Plan,
    decision: StepDecision | None,
    last_step: int,
    leaving: Sequence[str],
    balance: Balance | None = None,
    replacing: Replacing = (),
) -> Plan:
    """The next epoch's plan: in its first step that is not applied, leaving nodes hand over.

    Args:
        decision: about the newest step.
        last_step: after it there is nothing to hand over.
        leaving: the nodes that are to go, the most urgent ones first.
        balance: by what microbatches are shared out anew; None where each pipeline keeps its own.
        replacing: the standbys that take places of theirs, ready to receive.
    """
    before = plan.after(decision)
    going = can_go(before, leaving, replacing)
    follows = next_plan(before, decision)
    step = first_open_step(decision, last_step)
    if step > last_step or not going:
        return replace(follows, reason="nothing is left to change")
    left = {place_of(before, node) for node in going}
    coming = [(place, standby) for place, standby in replacing if place in left]
    after = tuple(
        without(pipeline, going, [(p.rank, node) for p, node in coming if p.pipeline == number])
        for number, pipeline in enumerate(before.pipelines)
    )
    transfers = tuple(
        transfer
        for number, pipelines in enumerate(zip(before.pipelines, after, strict=True))
        for transfer in transfers_between(number, *pipelines)
    )
    moves = [
        f"{new} {'runs' if new in before.nodes else 'takes'} stage {stage} of pipeline {number} "
        f"{'for' if new in before.nodes else 'from'} {old}"
        for number, (old_pipe, new_pipe) in enumerate(zip(before.pipelines, after, strict=True))
        for stage, (old, new) in enumerate(zip(old_pipe.stages, new_pipe.stages, strict=True))
        if old != new
    ]
    shadowing = [t for t in transfers if after[t.pipeline].replicas[t.stage] == t.target]
    reasons = [*moves, transfers_reason(shadowing)] if shadowing else moves
    if balance is not None and (better := balance.better(after)) is not None:
        after = better.apply(after)
        reasons = [*reasons, better.reason]
    # They have ranks at once, to take part in the step in which they join.
    joining = tuple(
        now.with_joining(then.ranks) for now, then in zip(before.pipelines, after, strict=True)
    )
    change = Change(step, transfers, after)
    return replace(follows, pipelines=joining, change=change, reason="; ".join(reasons))


def counting_records(
    plan: Plan, records: Mapping[str, Record | Fenced]
) -> dict[str, Record | Fenced]:
    """The records from which an ended epoch's newest step is decided.

    Once a change is made the others go on without the nodes that it lets go, so that these may be
    more than one step behind. They have nothing to apply or to gather: only what one of them has
    passed counts.
    """
    if plan.change is None:
        return dict(records)
    step, let_go = plan.change.step, set(plan.let_go)
    spoken = [record for record in records.values() if isinstance(record, Record)]
    if not any(r.step > step or (r.step == step and r.passed) for r in spoken):
        return dict(records)
    counting: dict[str, Record | Fenced] = {}
    for worker, record in records.items():
        if node_of(worker) not in let_go:
            counting[worker] = record
        elif isinstance(record, Record) and record.passed and record.step == step:
            counting[worker] = replace(record, gathered=step)
    return counting


def without(
    pipeline: PipelinePlan, going: Collection[str], standbys: Sequence[tuple[int, str]] = ()
) -> PipelinePlan:
    """The pipeline with the stages of those who go on nodes that stay, and on standbys in ranks."""
    renewed = pipeline
    for rank, standby in standbys:
        renewed = in_place(renewed, rank, standby)
    stages = tuple(_runner(renewed, stage, going) for stage in range(len(renewed.stages)))
    if stages == pipeline.stages:
        return pipeline
    return protected(replace(renewed, stages=stages))


def _runner(pipeline: PipelinePlan, stage: int, going: Collection[str]) -> str:
    """Who runs a stage without those who go: its shadow or, if need be, the nearest before it."""
    if pipeline.stages[stage] not in going:
        return pipeline.stages[stage]
    shadow = pipeline.replicas[stage]
    if shadow is not None and shadow not in going:
        return shadow
    num_stages = len(pipeline.stages)
    before = (pipeline.stages[(stage - back) % num_stages] for back in range(1, num_stages))
    return next(node for node in before if node not in going)
