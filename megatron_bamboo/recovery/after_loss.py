"""What is done about a loss: the cheapest answer that the policy has, and that works.

The shadow takes over; else the step is done again in pipelines made of what live nodes hold; else
all start from the last checkpoint; else those who are left wait for others.
"""

from collections.abc import Sequence

from megatron_bamboo.planner.holders import held_by
from megatron_bamboo.planner.infeasible import counted
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.planner.taking_over import NoHolder, plan_after_loss
from megatron_bamboo.recovery.decision import Action, Decision, Reason, Verdict
from megatron_bamboo.recovery.names import PolicyName
from megatron_bamboo.recovery.outlook import Weighing, expected_seconds
from megatron_bamboo.recovery.prices import Prices
from megatron_bamboo.recovery.prospects import Prospect, Prospects, numbers_of
from megatron_bamboo.recovery.view import Event, Lost, View
from megatron_bamboo.schedule.redundancy import Redundancy


class AfterLoss:
    """The answers of one policy; arguments as those of ``Policy``."""

    def __init__(self, name: PolicyName, prospects: Prospects, prices: Prices) -> None:
        self._name = name
        self._prospects = prospects
        self._prices = prices

    def answer(self, view: View, plan: Plan, event: Event, now: float) -> Verdict:
        """What is done now that nodes of the plan are lost."""
        words = str(event)
        # Once the iteration is broken off there is nothing left to take over.
        if self._name.redundancy is not Redundancy.NONE and isinstance(event, Lost):
            try:
                return self._take_over(plan, plan_after_loss(plan, view.lost, None), words)
            except NoHolder as error:
                words += f"; {error}"
        if self._name in (PolicyName.BAMBOO, PolicyName.CHECKPOINT):
            return self.start(view, words)
        if options := self._other_pipelines(view):
            return self._do_again(view, plan, options, words, now)
        return self.start(view, f"{words}; live nodes hold the state of no pipelines")

    def start(self, view: View, words: str) -> Verdict:
        """All start, from a checkpoint if there is one; or too few wait for others.

        Args:
            words: what has come before, for the reason.
        """
        prospect = self._prospects.afresh(view.nodes)
        if prospect is None:
            can_save = self._name is not PolicyName.CHECKPOINT and _hold_everything(view)
            words += f"; {counted(len(view.nodes), 'node')} are too few for the model"
            decision = Decision(Action.WAIT, saves=can_save and view.saved_step < view.step)
            return decision, Reason(words, {"nodes": len(view.nodes)})
        words += f"; {prospect.why}, from step {view.saved_step}"
        numbers = {"lost_steps": view.step - view.saved_step, **numbers_of(prospect)}
        return Decision(Action.RESTORE, prospect.pipelines), Reason(words, numbers)

    def _take_over(self, before: Plan, after: Plan, words: str) -> Verdict:
        seconds = self._prospects.times.of
        numbers = {
            "iteration_seconds": seconds(before.pipelines),
            "iteration_seconds_then": seconds(after.pipelines),
            "pause_seconds": self._prices.takeover_seconds,
        }
        decision = Decision(Action.TAKE_OVER, after.pipelines)
        return decision, Reason(f"{words}; {after.reason}", numbers)

    def _other_pipelines(self, view: View) -> tuple[Prospect, ...]:
        """By Oobleck's rules and, where the policy looks for them, the fastest."""
        found = [self._prospects.by_rules(view)]
        if self._name is PolicyName.AUTO:
            found.append(self._prospects.fastest(view))
        return tuple(prospect for prospect in found if prospect is not None)

    def _do_again(
        self, view: View, plan: Plan, options: Sequence[Prospect], words: str, now: float
    ) -> Verdict:
        """The broken iteration once more, in other pipelines: those with most until the next
        event."""
        before = self._prospects.times.of(plan.pipelines)
        expected = expected_seconds(view.history, now)

        def weigh(prospect: Prospect) -> Weighing:
            pause = self._prices.reconfigure_seconds + prospect.move_seconds
            return Weighing(expected, before, prospect.iteration_seconds, 0.0, pause)

        best = max(options, key=lambda prospect: weigh(prospect).changed)
        decision = Decision(Action.RECONFIGURE, best.pipelines, best.move_seconds)
        return decision, Reason(f"{words}; {best.why}", numbers_of(best, weigh(best)))


def _hold_everything(view: View) -> bool:
    """Whether those who live have the state of all units."""
    if view.plan is None:
        return False
    held = held_by(view.plan.pipelines)
    alive = frozenset[int]().union(*(held[node] for node in view.survivors))
    return len(alive) == view.plan.arrangement.num_units
