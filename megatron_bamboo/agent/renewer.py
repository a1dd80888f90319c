"""When a job with checkpoints alone begins again with nodes that have come: as soon as that pays.

Without replicas nobody can join a pipeline that trains, so newcomers cost what a loss costs: all go
back to the last checkpoint. What is weighed is measured: what steps take, and what the last return
has taken. How long the next event is to be expected is known only from what this coordinator has
seen.
"""

import time
from collections.abc import Callable

from megatron_bamboo.agent.forecast import Forecast
from megatron_bamboo.agent.headway import Headway
from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.members import Members
from megatron_bamboo.agent.restorer import Restorer
from megatron_bamboo.membership.decision import StepReport
from megatron_bamboo.observe.events import Emitter
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.recovery.names import PolicyName
from megatron_bamboo.recovery.outlook import Weighing
from megatron_bamboo.recovery.prices import Prices


class Renewer:
    """Whether all are to begin again with those who have come."""

    def __init__(
        self,
        shape: JobShape,
        members: Members,
        restorer: Restorer,
        headway: Headway,
        events: Emitter,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_wanted = PolicyName(shape.policy) is PolicyName.CHECKPOINT
        self._balance = shape.sharing()
        self._total = shape.arrangement.total_microbatches
        self._members = members
        self._restorer = restorer
        self._headway = headway
        self._now = now
        self._forecast = Forecast(events, now)
        self._known: frozenset[str] | None = None
        self._epoch = -1
        self._since: float | None = None
        """When this coordinator has published the plan, if it has."""
        self._step_seconds: float | None = None
        """What the fastest step of the newest epoch has taken."""
        self._pause_seconds = Prices().restore_seconds
        """What the last return to a checkpoint has taken."""

    def published(self, plan: Plan) -> None:
        """A plan is in force from now on."""
        self._epoch, self._since, self._step_seconds = plan.epoch, self._now(), None

    def found(self, plan: Plan) -> None:
        """A plan is in force that another coordinator has published."""
        self._epoch = plan.epoch

    def passed(self, report: StepReport, plan: Plan) -> None:
        """A step has passed."""
        if report.epoch != self._epoch:
            return
        since = self._since if self._step_seconds is None else None
        if since is not None and plan.restored is not None:
            self._pause_seconds = max(0.0, self._now() - since - report.seconds)
        known = report.seconds if self._step_seconds is None else self._step_seconds
        self._step_seconds = min(known, report.seconds)

    def due(self, plan: Plan) -> tuple[str, ...]:
        """All with whom it pays to begin again; nobody if it does not."""
        if not self._is_wanted:
            return ()
        nodes = self._restorer.nodes(plan, frozenset())
        self._look_around(frozenset(nodes))
        if self._step_seconds is None or set(nodes) <= set(plan.nodes):
            return ()
        after = self._restorer.plan(plan, nodes, frozenset())
        if set(after.nodes) <= set(plan.nodes):
            return ()
        return nodes if self._pays(plan, after, self._step_seconds) else ()

    def _pays(self, plan: Plan, after: Plan, seconds: float) -> bool:
        """Whether it does, by what is known of the steps so far."""
        ticks, ticks_then = (
            self._balance.best(pipelines, self._total).ticks
            for pipelines in (plan.pipelines, after.pipelines)
        )
        undone = self._headway.step - self._headway.checkpoint.step
        weighing = Weighing(
            self._forecast.expected_seconds,
            seconds,
            seconds * ticks_then / ticks,
            0.0,
            self._pause_seconds + undone * seconds,
        )
        nodes = sorted(after.nodes)
        return self._forecast.pays("renewal", plan.epoch, tuple(nodes), weighing, nodes=nodes)

    def _look_around(self, nodes: frozenset[str]) -> None:
        """Take note of when nodes were lost or came."""
        if self._known is not None:
            self._forecast.saw(len(self._known ^ nodes))
        self._known = nodes
