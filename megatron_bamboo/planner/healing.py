"""What makes a job whole again after takeovers: new shadows, and standbys in the place of victims.

Both are planned changes: state is replicated in one step and counts from the next one on. Nothing
here is urgent, since each unit still has a holder; a second loss before the change is made may
find a stage that has no other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.plan import Change, PipelinePlan, Plan, Transfer
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.schedule.redundancy import shadows_of

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Vacancy:
    """A rank whose node is lost: its own stage runs elsewhere, until a standby takes it."""

    pipeline: int
    rank: int


def vacancies(plan: Plan) -> tuple[Vacancy, ...]:
    """The ranks without a live node, pipeline by pipeline."""
    return tuple(
        Vacancy(number, rank)
        for number, pipeline in enumerate(plan.pipelines)
        for rank, node in enumerate(pipeline.ranks)
        if node not in pipeline.stages
    )


def unprotected(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Pipeline and stage of each unit of state that one node alone holds in its pipeline."""
    return tuple(
        (number, stage)
        for number, pipeline in enumerate(plan.pipelines)
        for stage, holder in enumerate(pipeline.replicas)
        if holder is None
    )


def can_protect(plan: Plan) -> bool:
    """Whether a stage without a replica can get one on the nodes that its pipeline has."""
    return any(protected(pipeline) != pipeline for pipeline in plan.pipelines)


def can_balance(plan: Plan, balance: Balance | None) -> bool:
    """Whether an iteration takes less with other microbatches."""
    if balance is None:
        return False
    return balance.better(tuple(map(protected, plan.pipelines))) is not None


def with_standby(pipeline: PipelinePlan, rank: int, standby: str) -> PipelinePlan:
    """The pipeline with a standby in a vacant rank: it runs the stage of that number again."""
    return protected(in_place(pipeline, rank, standby))


def in_place(pipeline: PipelinePlan, rank: int, standby: str) -> PipelinePlan:
    """The same, with the replicas that there are."""
    ranks = _put(pipeline.ranks, rank, standby)
    return replace(pipeline, ranks=ranks, stages=_put(pipeline.stages, rank, standby))


def heal(
    plan: Plan,
    decision: StepDecision | None,
    last_step: int,
    standby: tuple[Vacancy, str] | None = None,
    balance: Balance | None = None,
) -> Plan:
    """The next epoch's plan: a standby takes a vacancy, or lost replicas are made anew.

    Args:
        decision: about the newest step; what moves does so in the first one that is not applied.
        last_step: after it there is nothing to protect.
        standby: the node, ready to receive, and where; without one only new shadows are made.
        balance: by what microbatches are shared out anew; None where each pipeline keeps its own.
    """
    before = plan.after(decision)
    after = list(map(protected, before.pipelines))
    if standby is not None:
        vacancy, node = standby
        pipeline = before.pipelines[vacancy.pipeline]
        after[vacancy.pipeline] = with_standby(pipeline, vacancy.rank, node)
        # It has the rank at once, to take part in the step in which it joins.
        joined = replace(pipeline, ranks=_put(pipeline.ranks, vacancy.rank, node))
        pipelines = _put(before.pipelines, vacancy.pipeline, joined)
        before = replace(before, pipelines=pipelines)
    transfers = tuple(
        transfer
        for number, pipelines in enumerate(zip(before.pipelines, after, strict=True))
        for transfer in transfers_between(number, *pipelines)
    )
    follows = next_plan(before, decision)
    step = first_open_step(decision, last_step)
    better = None if balance is None else balance.better(after)
    if step > last_step or not (transfers or better):
        unchanged = plan.after(decision).pipelines
        return replace(follows, pipelines=unchanged, reason="nothing is left to change")
    reasons = [_reason(transfers, standby)] if transfers else []
    if better is not None:
        after = list(better.apply(after))
        reasons.append(better.reason)
    change = Change(step, transfers, tuple(after))
    return replace(follows, change=change, reason="; ".join(reasons))


def next_plan(before: Plan, decision: StepDecision | None) -> Plan:
    """The same plan in the next epoch, without loss."""
    return replace(
        before,
        epoch=before.epoch + 1,
        lost=(),
        decision=decision,
        redone=None,
        redoing=(),
        dismissed=(),
        restored=None,
    )


def stages_to_hold(pipeline: PipelinePlan, node: str) -> tuple[int, ...]:
    """The stages that a node runs or shadows, ascending."""
    pairs = zip(pipeline.stages, pipeline.replicas, strict=True)
    return tuple(stage for stage, holders in enumerate(pairs) if node in holders)


def first_open_step(decision: StepDecision | None, last_step: int) -> int:
    """The first step that is not applied; one after the last if nobody knows it."""
    return last_step + 1 if decision is None else decision.step + decision.applied


def protected(pipeline: PipelinePlan) -> PipelinePlan:
    """The pipeline with a shadow for each stage, as far as it has other nodes."""
    wanted = shadows_of(pipeline.placement())
    return replace(
        pipeline,
        replicas=tuple(None if rank is None else pipeline.ranks[rank] for rank in wanted),
    )


def transfers_between(number: int, before: PipelinePlan, after: PipelinePlan) -> Iterator[Transfer]:
    """What must move so that each stage's holders are those of the second arrangement."""
    for stage, source in enumerate(before.stages):
        held = {source, before.replicas[stage]}
        for target in (after.stages[stage], after.replicas[stage]):
            if target is not None and target not in held:
                yield Transfer(number, stage, source, target)


def transfers_reason(transfers: Sequence[Transfer]) -> str:
    """Who shadows what from now on."""
    moves = (f"{t.target} shadows stage {t.stage} of pipeline {t.pipeline}" for t in transfers)
    return "; ".join(moves)


def _reason(transfers: tuple[Transfer, ...], standby: tuple[Vacancy, str] | None) -> str:
    if standby is not None:
        vacancy, node = standby
        return f"{node} takes stage {vacancy.rank} of pipeline {vacancy.pipeline}"
    return transfers_reason(transfers)


def _put(values: tuple[_T, ...], place: int, value: _T) -> tuple[_T, ...]:
    return (*values[:place], value, *values[place + 1 :])
