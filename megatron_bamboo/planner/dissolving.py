"""What follows a loss after which nobody has some stage of a pipeline: others do its work.

The pipeline is dissolved. The step that is open is begun anew by all others, among whom the whole
batch is shared out, since who has which microbatch has changed; a step that has passed is not
touched. A dissolved pipeline keeps its number, and its live nodes are free.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.plan import (
    NOTHING_LOST,
    Change,
    NoHolder,
    PipelinePlan,
    Plan,
    dissolved,
    plan_after_loss,
)
from megatron_bamboo.planner.rebalancing import Balance


def go_on_after(
    plan: Plan,
    lost: Set[str],
    decision: StepDecision | None,
    first_step: int,
    balance: Balance | None,
) -> Plan:
    """The next epoch's plan: each lost node's stages run where their replicas are, or the others do
    the work of its pipeline.

    Args:
        first_step: of the job; before its commit is entered the decision is about no step.
        balance: by what microbatches are shared out; None where each pipeline keeps its own.

    Raises:
        NoHolder: nobody has some stage of a pipeline, and no other pipeline can do its work.
    """
    broken = broken_pipelines(plan.after(decision), lost)
    working = sum(pipeline.shape.num_microbatches > 0 for pipeline in plan.pipelines)
    if balance is None or decision is None or not broken or len(broken) == working:
        return _with_old_cut(plan, plan_after_loss(plan, lost, decision), first_step)
    after = plan_after_loss(_without(plan, broken), lost, decision)
    best = balance.best(after.pipelines, plan.arrangement.total_microbatches)
    shared = best.apply(after.pipelines)
    step = _open_step(first_step, decision)
    gone = {*after.nodes, *after.lost, *plan.freed(decision)}
    return replace(
        after,
        pipelines=shared,
        change=None if after.change is None else _with_shares(after.change, shared),
        redone=step,
        dismissed=tuple(node for node in plan.nodes if node not in gone),
        reason=_reason(after, broken, shared, step),
    )


def _with_old_cut(before: Plan, after: Plan, first_step: int) -> Plan:
    """The plan after a loss; where it has undone a new cut its step is begun anew, so that nobody
    waits for units that never come."""
    change, decision = before.change, after.decision
    if change is None or not change.recut or decision is None or change.is_made(decision):
        return after
    step = _open_step(first_step, decision)
    given_up = f"the new cut is given up, and step {step} is begun anew"
    return replace(after, redone=step, reason=f"{after.reason}; {given_up}")


def _open_step(first_step: int, decision: StepDecision) -> int:
    return max(first_step, decision.step + decision.applied)


def broken_pipelines(plan: Plan, lost: Set[str]) -> dict[int, NoHolder]:
    """By pipeline that has a stage without a live holder, which that is and whose it was."""
    broken: dict[int, NoHolder] = {}
    for number, pipeline in enumerate(plan.pipelines):
        if pipeline.begins:  # it does no work yet
            continue
        for stage, holders in enumerate(zip(pipeline.stages, pipeline.replicas, strict=True)):
            known = [holder for holder in holders if holder is not None]
            if lost >= set(known):
                broken.setdefault(number, NoHolder(number, stage, known))
    return broken


def _without(plan: Plan, numbers: Collection[int]) -> Plan:
    """The plan, and its change, without pipelines that are to be dissolved."""
    change = plan.change
    if change is not None:
        transfers = tuple(t for t in change.transfers if t.pipeline not in numbers)
        pipelines = _dissolved(change.pipelines, numbers)
        change = replace(change, transfers=transfers, pipelines=pipelines)
    return replace(plan, pipelines=_dissolved(plan.pipelines, numbers), change=change)


def _dissolved(
    pipelines: tuple[PipelinePlan, ...], numbers: Collection[int]
) -> tuple[PipelinePlan, ...]:
    return tuple(
        dissolved(pipeline) if number in numbers else pipeline
        for number, pipeline in enumerate(pipelines)
    )


def _with_shares(change: Change, shared: Sequence[PipelinePlan]) -> Change:
    """A change that changes no shares once it is made."""
    pipelines = tuple(
        replace(pipe, shape=now.shape) for pipe, now in zip(change.pipelines, shared, strict=True)
    )
    return replace(change, pipelines=pipelines)


def _reason(
    after: Plan, broken: Mapping[int, NoHolder], shared: Sequence[PipelinePlan], step: int
) -> str:
    takeovers = [after.reason] if after.reason != NOTHING_LOST else []
    numbers = ", ".join(str(pipeline.shape.num_microbatches) for pipeline in shared)
    ends = [f"{why}, so it is dissolved" for why in broken.values()]
    return "; ".join([*takeovers, *ends, f"step {step} is begun anew, with microbatches {numbers}"])
