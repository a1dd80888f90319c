"""Where a pipeline has one node left, nothing but another node protects it: wait for one or not.

A job that waits ends the step that is open, saves it, and begins the next one when there is a node
more. Everybody must stop after the same step and save it, so the plan names it; and it stays named
while it may still be saved, whatever else is planned meanwhile.
"""

from dataclasses import replace

from megatron_bamboo.planner.healing import first_open_step
from megatron_bamboo.planner.plan import Hold, Plan


def lonely(plan: Plan) -> tuple[int, ...]:
    """The pipelines that one node runs alone, once the planned change is made."""
    pipelines = plan.pipelines if plan.change is None else plan.change.pipelines
    return tuple(
        number for number, pipeline in enumerate(pipelines) if len(set(pipeline.stages)) == 1
    )


def held(before: Plan, plan: Plan, first_step: int, last_step: int) -> Plan:
    """The plan that follows another one, with the step after which all wait, if they do.

    Args:
        before: a step that is named there has been saved before a change is planned.
        first_step: that of the training, or since all went back.
        last_step: after it there is nothing to wait for.
    """
    hold = None if plan.restored is not None else before.hold
    if not lonely(plan):
        return replace(plan, hold=None if hold is None else replace(hold, is_over=True))
    if hold is not None and not hold.is_over and plan.change is None:
        return replace(plan, hold=hold)
    step = _open_step(plan, first_step, last_step)
    return replace(plan, hold=hold if step >= last_step else Hold(step))


def _open_step(plan: Plan, first_step: int, last_step: int) -> int:
    """The next step to pass, that of the change if there is one."""
    if plan.change is not None:
        return plan.change.step
    if plan.restored is not None:
        return plan.restored.step + 1
    return max(first_step, first_open_step(plan.decision, last_step))
