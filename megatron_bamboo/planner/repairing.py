"""What follows a loss after which a pipeline misses stages that others have: it gets copies.

Pipelines that are cut alike have the same state between two steps, bit for bit. So the primary of
such a stage in another pipeline sends it to a live node of the pipeline that misses it, which runs
the stage from then on. That pipeline begins its open step anew, with the microbatches that it had;
all others go on. Nothing but time is lost: each sum has the same parts in the same order.

If another loss comes before that step has passed, what was to be sent counts as missing again.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.missing import StagePlace, missing_stages
from megatron_bamboo.planner.plan import Change, PipelinePlan, Plan, Transfer
from megatron_bamboo.planner.taking_over import NOTHING_LOST, NoHolder, plan_after_loss

Crews = Mapping[int, Sequence[str]]
"""By pipeline that has no live node: the standbys that become it, by rank."""


def deserted(plan: Plan, lost: Set[str], decision: StepDecision | None) -> tuple[int, ...]:
    """The pipelines that have work, and no live node to do it."""
    live = _live(plan, lost, decision)
    numbers = dict.fromkeys(number for number, _ in missing_stages(plan, lost, decision))
    return tuple(n for n in numbers if live.isdisjoint(plan.pipelines[n].without_joining().ranks))


def manned(plan: Plan, number: int, crew: Sequence[str]) -> PipelinePlan:
    """A pipeline whose nodes are all lost as it goes on with others, by rank."""
    none: tuple[str | None, ...] = (None,) * len(crew)
    return replace(plan.pipelines[number], stages=tuple(crew), replicas=none, ranks=tuple(crew))


def repair(plan: Plan, lost: Set[str], decision: StepDecision, step: int, crews: Crews) -> Plan:
    """The next epoch's plan: each missing stage is taken by a node of its pipeline, with the state
    of another one; whatever else was lost is taken over.

    Args:
        decision: about the newest step.
        step: the one that is open.
        crews: of some or all of the pipelines that are ``deserted``.

    Raises:
        NoHolder: no other pipeline has a missing stage, or nobody is left who could take it.
    """
    missing = missing_stages(plan, lost, decision)
    if plan.is_changed(decision):
        plan = plan.made()
    live = _live(plan, lost, decision) | {node for crew in crews.values() for node in crew}
    pipelines = list(plan.pipelines)
    for number, crew in crews.items():
        pipelines[number] = manned(plan, number, crew)
    for (number, stage), why in missing.items():
        pipelines[number] = _taken(pipelines[number], stage, live, why)
    mended = replace(plan, pipelines=tuple(pipelines), change=_without(plan.change, missing))
    after = plan_after_loss(mended, lost, decision)
    gone = set(plan.nodes) - {*after.nodes, *after.dismissed}
    transfers = tuple(_transfers(after, missing))
    change = after.change or Change(step, (), after.pipelines)
    assert change.step == step, f"state moves in step {change.step}, and step {step} is open"
    redoing = tuple(dict.fromkeys(number for number, _ in missing))
    return replace(
        after,
        lost=tuple(sorted(lost | gone)),
        change=replace(change, transfers=(*change.transfers, *transfers)),
        redone=step,
        redoing=redoing,
        reason=_reason(after, transfers, redoing, step),
    )


def _live(plan: Plan, lost: Set[str], decision: StepDecision | None) -> Set[str]:
    """Who is there, standbys that are just joining too."""
    return set((plan.made() if plan.is_changed(decision) else plan).nodes) - lost


def _without(change: Change | None, missing: Collection[StagePlace]) -> Change | None:
    """A change without the state that was to come from who has not got it."""
    if change is None:
        return None
    kept = (t for t in change.transfers if (t.pipeline, t.stage) not in missing)
    return replace(change, transfers=tuple(kept))


def _taken(pipeline: PipelinePlan, stage: int, live: Set[str], why: NoHolder) -> PipelinePlan:
    """The pipeline with a missing stage on its own rank or, if need be, the nearest before it."""
    ranks = pipeline.without_joining().ranks
    before = (ranks[stage - back] for back in range(len(ranks)))
    taker = next((node for node in before if node in live), None)
    if taker is None:
        also = "others have its state, but none of its nodes is left and too few standbys wait"
        raise NoHolder(why.pipeline, stage, why.holders, also)
    stages, replicas = list(pipeline.stages), list(pipeline.replicas)
    stages[stage], replicas[stage] = taker, None
    return replace(pipeline, stages=tuple(stages), replicas=tuple(replicas))


def _transfers(after: Plan, missing: Mapping[StagePlace, NoHolder]) -> Iterator[Transfer]:
    """Who sends each missing stage: of those who run it, one that sends least."""
    sent: Counter[str] = Counter()
    for (number, stage), why in missing.items():
        sources = list(_sources(after, number, stage, missing))
        if not sources:
            raise NoHolder(number, stage, why.holders)
        source = min(sources, key=lambda node: sent[node])
        sent[source] += 1
        yield Transfer(number, stage, source, after.pipelines[number].stages[stage])


def _sources(
    after: Plan, number: int, stage: int, missing: Collection[StagePlace]
) -> Iterator[str]:
    wanted = after.pipelines[number].shape
    for other, pipeline in enumerate(after.pipelines):
        cut = (pipeline.shape.spans, pipeline.shape.num_chunks)
        is_alike = cut == (wanted.spans, wanted.num_chunks)
        if is_alike and pipeline.stages and (other, stage) not in missing:
            yield pipeline.stages[stage]


def _reason(after: Plan, transfers: Sequence[Transfer], redoing: Sequence[int], step: int) -> str:
    takeovers = [after.reason] if after.reason != NOTHING_LOST else []
    copies = [
        f"{t.target} gets stage {t.stage} of pipeline {t.pipeline}, which nobody else there has, "
        f"from {t.source} of pipeline {after.pipeline_of(t.source)}"
        for t in transfers
    ]
    numbers = " and ".join(map(str, redoing))
    return "; ".join([*takeovers, *copies, f"step {step} is begun anew in pipeline {numbers}"])
