"""When a planned change is due after losses, and who takes part in it.

A free standby is called first, since it gives a pipeline its shape back; while it gets ready,
nothing else is changed. Without one the stages that have lost their replica get a new one on the
nodes that are left. Where the policy lets microbatches change, they go with the same change, or by
themselves if nothing else is left to do.
"""

from collections.abc import Sequence

from megatron_bamboo.agent.calls import Calls
from megatron_bamboo.agent.ending import Standby
from megatron_bamboo.agent.members import Members
from megatron_bamboo.planner.healing import (
    Vacancy,
    can_balance,
    can_protect,
    vacancies,
    with_standby,
)
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.planner.rebalancing import Balance


class Healer:
    """Which standby has been called, and for which place."""

    def __init__(self, members: Members, calls: Calls, balance: Balance | None) -> None:
        self._members = members
        self._calls = calls
        self._balance = balance

    def standby_for(self, plan: Plan) -> Standby | None:
        """The standby that gets ready, or is, for a vacancy of this plan; called if need be."""
        if not (places := vacancies(plan)):
            return None
        for node, place in self._calls.called(plan).items():
            if place in places:
                return place, node
        if not (idle := self._calls.idle(plan)):
            return self._called_in_vain(plan, places)
        place, node = places[0], idle[0]
        pipeline = with_standby(plan.pipelines[place.pipeline], place.rank, node)
        self._calls.call(node, place, pipeline)
        return place, node

    def _called_in_vain(self, plan: Plan, places: Sequence[Vacancy]) -> Standby | None:
        """A standby that was called for the place of a node which stays after all: in the same
        pipeline it can take another, for it builds what it lacks when it joins."""
        for node, called in self._calls.called(plan).items():
            free = [place for place in places if place.pipeline == called.pipeline]
            # Nobody has the place of one that was called to join with a new cut.
            there = plan.pipelines[called.pipeline].ranks[called.rank : called.rank + 1]
            if free and not any(map(self._members.is_leaving, there)):
                return free[0], node
        return None

    def is_due(self, plan: Plan, standby: Standby | None) -> bool:
        """Whether a change can be planned now."""
        if plan.change is not None:
            return False
        if standby is not None:
            return self._members.is_ready(standby[1])
        return can_protect(plan) or can_balance(plan, self._balance)
