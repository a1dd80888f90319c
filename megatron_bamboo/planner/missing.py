"""What nobody in a pipeline has any more after a loss, though others may have it."""

from collections.abc import Set

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.planner.taking_over import NoHolder

StagePlace = tuple[int, int]
"""Pipeline and stage."""


def missing_stages(
    plan: Plan, lost: Set[str], decision: StepDecision | None
) -> dict[StagePlace, NoHolder]:
    """The stages that no live node of their pipeline has the state of, and whose it was.

    A node that was to get it in a step that has not passed does not count: nobody knows how far
    that came. A pipeline that has not begun yet has nothing to miss.
    """
    before = plan.after(decision)
    lacking = frozenset() if plan.is_changed(decision) else plan.lacking
    missing: dict[StagePlace, NoHolder] = {}
    for number, pipeline in enumerate(before.pipelines):
        for stage in () if pipeline.begins else range(len(pipeline.stages)):
            known = pipeline.holders(stage)
            having = [node for node in known if (number, stage, node) not in lacking]
            if lost >= set(having):
                missing[number, stage] = NoHolder(number, stage, having or known)
    return missing


def broken_pipelines(
    plan: Plan, lost: Set[str], decision: StepDecision | None
) -> dict[int, NoHolder]:
    """By pipeline that misses a stage, the first one."""
    broken: dict[int, NoHolder] = {}
    for (number, _), why in missing_stages(plan, lost, decision).items():
        broken.setdefault(number, why)
    return broken


def unsaved(plan: Plan, done: Set[str], shared: bool) -> NoHolder | None:
    """A stage that nobody who has done the whole training holds; None if there is none.

    Args:
        shared: the pipelines share the optimizer's state, so that none has another's.
    """
    saved = {
        (number if shared else pipeline.shape.spans, stage)
        for number, pipeline in enumerate(plan.pipelines)
        for stage in range(len(pipeline.stages))
        if any(node in done for node in pipeline.holders(stage))
    }
    for number, pipeline in enumerate(plan.pipelines):
        for stage in range(len(pipeline.stages)):
            if (number if shared else pipeline.shape.spans, stage) not in saved:
                return NoHolder(number, stage, pipeline.holders(stage))
    return None
