"""Lets a job wait for nodes where one alone runs a pipeline, if its user wants that."""

from megatron_bamboo.agent.calls import Calls
from megatron_bamboo.agent.headway import Headway
from megatron_bamboo.agent.job import JobSpec
from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.planner.holding import held, lonely
from megatron_bamboo.planner.plan import Plan


class Holder:
    """After which step all wait, and whether they do."""

    def __init__(self, spec: JobSpec, calls: Calls, headway: Headway, reporter: Reporter) -> None:
        self._shape = spec.shape
        self._others_come = spec.respawn_seconds is not None or not spec.nodes
        self._calls = calls
        self._headway = headway
        self._reporter = reporter
        self._unsaid: str | None = None

    def hold(self, before: Plan, plan: Plan, first_step: int) -> Plan:
        """A plan that is about to be published, with the step after which all wait for nodes; what
        is to be said of it is said by ``say``, after what has led to the plan."""
        self._unsaid = None
        if not self._shape.waits:
            return plan
        after = held(before, plan, first_step, self._shape.train_iters)
        if after.hold is None or after.hold.is_over:
            return after
        names = ", ".join(map(str, lonely(after)))
        if not (self._others_come or self._calls.called(plan) or self._calls.idle(plan)):
            self._unsaid = f"goes on with one node for pipeline {names}: no other can come"
            return plan
        if after.hold != before.hold:
            waits = f"saves step {after.hold.step} and waits for nodes"
            self._unsaid = f"{waits}: pipeline {names} has one node left"
        return after

    def say(self) -> None:
        """Say what the newest plan lets all wait for, or why nobody does."""
        if self._unsaid is not None:
            self._reporter.note(self._unsaid)
            self._unsaid = None

    def waits(self, plan: Plan) -> bool:
        """Whether no step passes now since all wait for nodes."""
        hold = plan.hold
        return hold is not None and not hold.is_over and self._headway.step >= hold.step

    def may_change(self, plan: Plan) -> bool:
        """Whether the step after which all wait is saved, or could not be, if there is one."""
        hold = plan.hold
        return hold is None or hold.is_over or self._headway.tried_to_save(hold.step)
