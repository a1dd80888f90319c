"""When pipelines are cut anew: as soon as that pays, for those who are left or for one who comes.

A standby in the place of a lost node comes first, and so does a dissolved pipeline that can begin
again: both give the job its shape back. Where there is none a pipeline may get a node of another
one. While a standby gets ready to join a pipeline, nothing else is changed. How long the next event
is to be expected is known only from what this coordinator has seen; another one begins anew.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from megatron_bamboo.agent.calls import Calls
from megatron_bamboo.agent.forecast import Forecast
from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.members import Members
from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.membership.decision import StepReport
from megatron_bamboo.observe.events import Emitter
from megatron_bamboo.planner.growing import growable, to_begin
from megatron_bamboo.planner.healing import Vacancy, vacancies
from megatron_bamboo.planner.new_cut import NewCut
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.planner.rearranging import Proposal
from megatron_bamboo.recovery.outlook import Weighing
from megatron_bamboo.recovery.prices import Prices

STEPS_TO_COME_BACK = 3
"""So many pass in an epoch before nodes change their pipeline for want of others."""


class Rearranger:
    """Which pipeline is to be cut anew, and which standby has been called for it."""

    def __init__(
        self,
        shape: JobShape,
        members: Members,
        calls: Calls,
        events: Emitter,
        reporter: Reporter,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rearranging = shape.rearranging()
        # Who did not ask for other pipelines is not told why there are none.
        self._why_not = shape.why_cuts_stay() if shape.balance() is not None else None
        self._members = members
        self._calls = calls
        self._reporter = reporter
        self._forecast = Forecast(events, now)
        self._known: set[str] | None = None
        self._epoch = -1
        self._seconds: float | None = None
        """What the fastest step of the newest epoch has taken."""
        self._num_steps = 0
        """That have passed in the newest epoch."""
        self._searched: tuple[Plan, tuple[Proposal, ...]] | None = None
        self.waits = False
        """Whether a standby gets ready to join a pipeline."""

    def note(self, report: StepReport) -> None:
        """A step has passed."""
        if report.epoch > self._epoch or self._seconds is None:
            self._epoch, self._seconds, self._num_steps = report.epoch, report.seconds, 1
        elif report.epoch == self._epoch:
            self._seconds = min(self._seconds, report.seconds)
            self._num_steps += 1

    def due(self, plan: Plan) -> NewCut | None:
        """The new cut that can be made now; a standby is called if need be."""
        self._look_around(plan)
        self.waits = False
        if self._why_not is not None and vacancies(plan):
            self._reporter.once("cuts-stay", f"pipelines keep their cuts: {self._why_not}")
        if self._rearranging is None or plan.change is not None:
            return None
        called, crew = self._called(plan), self._crew(plan)
        if any(not self._members.is_ready(node) for node in (*called, *crew)):
            self.waits = True
            return None
        proposals = (
            self._begun(plan, crew) if crew else None,
            *(self._rearranging.widened(plan, node) for node in called),
            *(() if called or crew else self._lent(plan)),
            self._rearranging.shrunk(plan),
        )
        for proposal in proposals:
            if proposal is not None and self._pays(proposal, plan):
                return proposal.wanted
        self._call(plan, crew)
        return None

    def _call(self, plan: Plan, crew: Sequence[str]) -> None:
        """Call standbys if it is worth to join a pipeline, or to be one that is dissolved."""
        assert self._rearranging is not None
        idle = self._calls.idle(plan)
        if not idle or vacancies(plan):
            return
        if gone := growable(plan):
            proposal = self._begun(plan, (*crew, *idle))
        else:
            proposal = self._rearranging.widened(plan, idle[0])
        if proposal is None or not self._pays(proposal, plan):
            return
        number, called = proposal.wanted.numbers[0], self._calls.called(plan)
        taken = {called[node].rank for node in crew}
        free = (rank for rank in range(len(proposal.first.stages)) if rank not in taken)
        new = (node for node in proposal.joining if node not in crew)
        ranks = free if gone else (len(proposal.first.stages) - 1,)
        for rank, node in zip(ranks, new, strict=False):
            self._calls.call(node, Vacancy(number, rank), proposal.first)
        self.waits = True

    def _lent(self, plan: Plan) -> tuple[Proposal, ...]:
        """The ways to share out the nodes that there are, where no other one is there or may soon
        be: who was let go, or is started again, comes back. Searched once for each plan."""
        assert self._rearranging is not None
        if self._calls.idle(plan) or self._num_steps < STEPS_TO_COME_BACK:
            return ()
        if self._searched is None or self._searched[0] is not plan:
            self._searched = plan, self._rearranging.lent(plan)
        return self._searched[1]

    def _begun(self, plan: Plan, crew: Sequence[str]) -> Proposal | None:
        """The first dissolved pipeline on fewer nodes than it had; with as many it begins as it was
        (``grower.py``)."""
        assert self._rearranging is not None
        number = growable(plan)[0]
        if len(crew) >= to_begin(plan, number).shape.num_stages:
            return None
        return self._rearranging.begun(plan, number, crew)

    def _crew(self, plan: Plan) -> list[str]:
        """The standbys that were called for the dissolved pipeline that is to begin first."""
        places = self._calls.called(plan).items()
        numbers = growable(plan)[:1]
        return [n for n, place in places if place.pipeline in numbers and not _is_new(plan, place)]

    def _called(self, plan: Plan) -> list[str]:
        """The standbys that were called for more stages than their pipeline has."""
        called = self._calls.called(plan).items()
        return [node for node, place in called if _is_new(plan, place)]

    def _pays(self, proposal: Proposal, plan: Plan) -> bool:
        """Whether a new cut is worth what it costs, by what is known of the steps so far, or is
        needed whatever it costs."""
        if self._seconds is None:
            return False
        tick = self._seconds / proposal.ticks_before
        weighing = Weighing(
            self._forecast.expected_seconds,
            tick * proposal.ticks_healed,
            tick * proposal.ticks,
            # State moves within one step.
            self._seconds,
            Prices().switch_seconds,
            *(_undone(num_alone, plan) for num_alone in proposal.num_alone),
        )
        wanted, is_needed = proposal.wanted, proposal.is_needed
        told = {"wanted": asdict(wanted), "is_needed": is_needed}
        return self._forecast.pays("new_cut", plan.epoch, wanted, weighing, **told) or is_needed

    def _look_around(self, plan: Plan) -> None:
        """Take note of when nodes were lost or came."""
        came = set(self._members.waiting_standbys()) - set(plan.nodes)
        names = {f"-{node}" for node in self._members.lost} | {f"+{node}" for node in came}
        known = names if self._known is None else self._known
        self._forecast.saw(len(names - known))
        self._known = known | names


def _undone(num_alone: int, plan: Plan) -> float:
    """Iterations that the loss of any node undoes: where one runs a pipeline alone its loss lets
    all begin the step anew, which is half done then."""
    return num_alone / len(plan.nodes) / 2


def _is_new(plan: Plan, place: Vacancy) -> bool:
    """Whether a place is none that its pipeline has, or begins again with."""
    pipeline = plan.pipelines[place.pipeline]
    if not pipeline.stages:
        pipeline = to_begin(plan, place.pipeline)
    return place.rank >= pipeline.shape.num_stages
