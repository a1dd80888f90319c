"""A dissolved pipeline begins again on standbys, with state from another pipeline's nodes.

In the step of the change it has its nodes already and no microbatches: they get the state as it is
before that step, and take part in its reductions with nothing of their own. So they know its final
gradient, make the optimizer's step with all others, and are in sync when its commit has passed.
From the next step on the batch is shared out among all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.healing import first_open_step, next_plan, protected
from megatron_bamboo.planner.plan import Change, PipelinePlan, Plan, Transfer
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.schedule.redundancy import Redundancy


@dataclass(frozen=True, slots=True)
class Growth:
    """The standbys that become a pipeline, by rank."""

    pipeline: int
    nodes: tuple[str, ...]


def growable(plan: Plan) -> tuple[int, ...]:
    """The dissolved pipelines, which can begin again."""
    return tuple(n for n, pipeline in enumerate(plan.pipelines) if not pipeline.stages)


def to_begin(plan: Plan, number: int) -> PipelinePlan:
    """A dissolved pipeline with the cut with which it begins again: its own where another one is
    cut like it, which has its state, else that of another one."""
    pipeline = plan.pipelines[number]
    if _alike(plan, pipeline):
        return pipeline
    shape = plan.pipelines[plan.first_pipeline].shape
    return replace(pipeline, shape=replace(shape, num_microbatches=0))


def crewed(pipeline: PipelinePlan, nodes: Sequence[str], redundancy: Redundancy) -> PipelinePlan:
    """A pipeline as it is while it begins on some nodes."""
    crew = tuple(nodes)
    none: tuple[str | None, ...] = (None,) * len(crew)
    begun = PipelinePlan(crew, none, crew, replace(pipeline.shape, num_microbatches=0))
    return begun if redundancy is Redundancy.NONE else protected(begun)


def grow(
    plan: Plan, decision: StepDecision | None, last_step: int, growth: Growth, balance: Balance
) -> Plan:
    """The next epoch's plan: in its first step that is not applied a pipeline begins again.

    Args:
        decision: about the newest step.
        last_step: after it there is nothing to grow for.
        balance: by what microbatches are shared out.
    """
    before = plan.after(decision)
    follows, step = next_plan(before, decision), first_open_step(decision, last_step)
    number = growth.pipeline
    if step > last_step or number not in growable(before):
        return replace(follows, reason="nothing is left to change")
    begun = crewed(to_begin(before, number), growth.nodes, balance.redundancy)
    pipelines = (*before.pipelines[:number], begun, *before.pipelines[number + 1 :])
    best = balance.best(pipelines, plan.arrangement.total_microbatches)
    shares = ", ".join(map(str, best.numbers))
    change = Change(step, tuple(_transfers(before, number, begun)), best.apply(pipelines))
    reason = (
        f"pipeline {number} begins again on {', '.join(growth.nodes)}; from then on the "
        f"microbatches are {shares}"
    )
    return replace(follows, pipelines=pipelines, change=change, reason=reason)


def _transfers(plan: Plan, number: int, begun: PipelinePlan) -> Iterator[Transfer]:
    """All state of a pipeline, from those that are cut like it in turn."""
    sources = _alike(plan, begun)
    for stage, holders in enumerate(zip(begun.stages, begun.replicas, strict=True)):
        for turn, target in enumerate(holders):
            if target is not None:
                source = sources[(stage + turn) % len(sources)]
                yield Transfer(number, stage, source.stages[stage], target)


def _alike(plan: Plan, pipeline: PipelinePlan) -> list[PipelinePlan]:
    cut = (pipeline.shape.spans, pipeline.shape.num_chunks)
    return [p for p in plan.pipelines if p.stages and (p.shape.spans, p.shape.num_chunks) == cut]
