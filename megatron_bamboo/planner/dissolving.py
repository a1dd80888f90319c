"""What follows a loss after which nobody has some stage of a pipeline: others do its work.

The pipeline is dissolved. The step that is open is begun anew by all others, among whom the whole
batch is shared out, since who has which microbatch has changed; a step that has passed is not
touched. A dissolved pipeline keeps its number, and its live nodes are free.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.missing import broken_pipelines
from megatron_bamboo.planner.plan import Change, PipelinePlan, Plan, dissolved
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.planner.repairing import Crews, repair
from megatron_bamboo.planner.taking_over import NOTHING_LOST, NoHolder, plan_after_loss


def go_on_after(
    plan: Plan,
    lost: Set[str],
    decision: StepDecision | None,
    steps: range,
    balance: Balance | None,
    crews: Crews | None = None,
) -> Plan:
    """The next epoch's plan: each lost node's stages run where their replicas are; or, of a stage
    that has none left, the others do the work of its pipeline, or give it their copy.

    Args:
        steps: the job's; before the commit of the first one is entered the decision is about none.
        balance: by what microbatches are shared out; None where each pipeline keeps its own.
        crews: the standbys that become pipelines without live nodes; None where no pipeline can be
            given another's state.

    Raises:
        NoHolder: nobody has some stage of a pipeline, and the others can do neither.
    """
    broken = broken_pipelines(plan, lost, decision)
    if decision is None or not broken:
        return _with_old_cut(plan, plan_after_loss(plan, lost, decision), steps)
    step = first_open(decision, steps)
    if balance is not None and _can_others_do_all(plan, broken, balance):
        return _dissolve(plan, lost, decision, broken, step, steps, balance)
    if crews is not None:
        return _with_old_cut(plan, repair(plan, lost, decision, step, crews), steps)
    raise next(iter(broken.values()))


def first_open(decision: StepDecision, steps: range) -> int:
    """The first of a job's steps that is not applied; after the last one, the next number."""
    return max(steps.start, decision.step + decision.applied)


def _can_others_do_all(plan: Plan, broken: Collection[int], balance: Balance) -> bool:
    """Whether the other pipelines that work can have the whole batch."""
    others = [
        pipeline
        for number, pipeline in enumerate(plan.pipelines)
        if number not in broken and pipeline.shape.num_microbatches
    ]
    return balance.can_share(others, plan.arrangement.total_microbatches)


def _dissolve(
    plan: Plan,
    lost: Set[str],
    decision: StepDecision,
    broken: Mapping[int, NoHolder],
    step: int,
    steps: range,
    balance: Balance,
) -> Plan:
    after = plan_after_loss(_without(plan, broken), lost, decision)
    best = balance.best(after.pipelines, plan.arrangement.total_microbatches)
    shared = best.apply(after.pipelines)
    gone = {*after.nodes, *after.lost, *plan.freed(decision)}
    return replace(
        after,
        pipelines=shared,
        change=None if after.change is None else _with_shares(after.change, shared),
        redone=step,
        redoing=_with_nodes(shared),
        dismissed=tuple(node for node in plan.nodes if node not in gone),
        reason=_reason(after, broken, shared, step, steps),
    )


def _with_old_cut(before: Plan, after: Plan, steps: range) -> Plan:
    """The plan after a loss; where it has undone a new cut its step is begun anew, so that nobody
    waits for units that never come."""
    change, decision = before.change, after.decision
    if change is None or not change.recut or decision is None or change.is_made(decision):
        return after
    step = first_open(decision, steps)
    given_up = f"the new cut is given up, and step {step} is begun anew"
    reason = f"{after.reason}; {given_up}"
    return replace(after, redone=step, redoing=_with_nodes(after.pipelines), reason=reason)


def _with_nodes(pipelines: Sequence[PipelinePlan]) -> tuple[int, ...]:
    return tuple(number for number, pipeline in enumerate(pipelines) if pipeline.stages)


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
    after: Plan,
    broken: Mapping[int, NoHolder],
    shared: Sequence[PipelinePlan],
    step: int,
    steps: range,
) -> str:
    takeovers = [after.reason] if after.reason != NOTHING_LOST else []
    numbers = ", ".join(str(pipeline.shape.num_microbatches) for pipeline in shared)
    ends = [f"{why}, so it is dissolved" for why in broken.values()]
    again = [f"step {step} is begun anew, with microbatches {numbers}"] * (step in steps)
    return "; ".join([*takeovers, *ends, *again])
