"""What follows from a loss: each lost node's stages run where their replicas are."""

from collections.abc import Sequence, Set
from dataclasses import replace

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.plan import Change, PipelinePlan, Plan, Transfer, dissolved

NOTHING_LOST = "no stage was lost"


class NoHolder(Exception):
    """No live node of a pipeline holds a stage: it cannot go on without another's copy."""

    def __init__(self, pipeline: int, stage: int, holders: Sequence[str], also: str = "") -> None:
        """``also``: what is to be said besides, about other pipelines."""
        self.pipeline = pipeline
        self.stage = stage
        self.holders = tuple(holders)
        held = f"{holders[0]} was its only one"
        if len(holders) > 1:
            held = f"{' and '.join(holders)} are both lost"
        what = f"pipeline {pipeline}: stage {stage} has no live holder ({held})"
        super().__init__(f"{what}; {also}" if also else what)


def plan_after_loss(plan: Plan, lost: Set[str], decision: StepDecision | None) -> Plan:
    """The next epoch's plan: each lost node's stages run where their replicas are.

    What moves in a step that is not applied goes on moving between those who live: whoever waits
    for it gets it. Who joins in the place of a live node gets it also from whoever has taken over
    from that one. A standby that can no longer join is lost, too. A new cut is given up
    (``dissolving.go_on_after`` begins its step anew).
    """
    before = plan.after(decision)
    pipelines, moves = [], []
    for number, whole in enumerate(before.pipelines):
        pipeline = dissolved(whole) if whole.begins else whole
        moves += [f"pipeline {number} cannot begin yet"] * whole.begins
        taken = [
            _taker(number, stage, pipeline, lost) if node in lost else node
            for stage, node in enumerate(pipeline.stages)
        ]
        moves += [
            f"{new} takes over stage {stage} of pipeline {number} from {old}"
            for stage, (old, new) in enumerate(zip(pipeline.stages, taken, strict=True))
            if old != new
        ]
        replicas = [
            None if pipeline.stages[stage] in lost or holder in lost else holder
            for stage, holder in enumerate(pipeline.replicas)
        ]
        pipelines.append(replace(pipeline, stages=tuple(taken), replicas=tuple(replicas)))
    after = replace(
        before,
        epoch=plan.epoch + 1,
        pipelines=tuple(pipelines),
        decision=decision,
        redone=None,
        redoing=(),
        restored=None,
        dismissed=tuple(
            node
            for pipe in before.pipelines
            if pipe.begins
            for node in pipe.ranks
            if node not in lost
        ),
        reason="; ".join(moves) or NOTHING_LOST,
    )
    change = plan.change
    if change and not change.recut and decision is not None and not change.is_made(decision):
        after = _going_on(after, plan, lost)
    kept = {*after.nodes, *after.dismissed, *plan.freed(decision)}
    return replace(after, lost=tuple(sorted(lost | (set(plan.nodes) - kept))))


def _taker(number: int, stage: int, pipeline: PipelinePlan, lost: Set[str]) -> str:
    holder = pipeline.replicas[stage]
    if holder is None or holder in lost:
        raise NoHolder(number, stage, pipeline.holders(stage))
    return holder


def _going_on(after: Plan, before: Plan, lost: Set[str]) -> Plan:
    """A plan with what losses have left of the change of the one before."""
    assert before.change is not None
    replacing = {node for pipeline in before.pipelines for node in pipeline.joining}
    left = _what_is_left(before.change, after.pipelines, lost, replacing)
    if left is None:
        return after
    pairs = zip(after.pipelines, left.pipelines, strict=True)
    pipelines = tuple(now.with_joining(then.ranks) for now, then in pairs)
    return replace(after, pipelines=pipelines, change=left)


def _what_is_left(
    change: Change, pipelines: Sequence[PipelinePlan], lost: Set[str], replacing: Set[str]
) -> Change | None:
    """A change without what was to come from or go to lost nodes, and without pipelines that were
    to begin; None if it is nothing then.

    Args:
        replacing: those who join in the places of nodes that were there.
    """
    alive = [
        replace(transfer, source=source)
        for transfer in change.transfers
        if transfer.target not in lost
        and (source := _source(transfer, pipelines, replacing)) is not None
    ]
    # A standby joins with a stage of its own to run, or not at all.
    running = {node for pipeline in pipelines for node in pipeline.stages}
    running |= {t.target for t in alive if change.pipelines[t.pipeline].stages[t.stage] == t.target}
    kept = tuple(transfer for transfer in alive if transfer.target in running)
    if not kept:
        return None
    after = [(list(pipeline.stages), list(pipeline.replicas)) for pipeline in pipelines]
    for transfer in kept:
        stages, replicas = after[transfer.pipeline]
        wanted = change.pipelines[transfer.pipeline].stages[transfer.stage]
        if wanted == transfer.target:
            stages[transfer.stage] = transfer.target
            replicas[transfer.stage] = transfer.source
        else:
            replicas[transfer.stage] = transfer.target
    arranged = tuple(
        # Who has handed over all that it runs holds nothing either: it was to be let go.
        replace(
            pipeline,
            stages=tuple(stages),
            replicas=tuple(node if node in stages else None for node in replicas),
            # One that was to begin has none.
            ranks=tuple(
                new if new in stages else old
                for old, new in zip(pipeline.ranks, wanted.ranks, strict=bool(pipeline.ranks))
            ),
        )
        for pipeline, wanted, (stages, replicas) in zip(
            pipelines, change.pipelines, after, strict=True
        )
    )
    return Change(change.step, kept, arranged)


def _source(
    transfer: Transfer, pipelines: Sequence[PipelinePlan], replacing: Set[str]
) -> str | None:
    """Who sends a stage's state after losses; None for nobody.

    Whoever has taken over from the one that was to has the same state, as it was before the step.
    """
    stages = pipelines[transfer.pipeline].stages
    if not stages or (
        stages[transfer.stage] != transfer.source and transfer.target not in replacing
    ):
        return None
    return stages[transfer.stage]
