"""When a planned change is due after losses, and who takes part in it.

A free standby is called first, since it gives a pipeline its shape back; while it gets ready,
nothing else is changed. Without one the stages that have lost their replica get a new one on the
nodes that are left. Where the policy lets microbatches change, they go with the same change, or by
themselves if nothing else is left to do.
"""

from megatron_bamboo.agent.calls import Calls
from megatron_bamboo.agent.ending import Standby
from megatron_bamboo.agent.members import Members
from megatron_bamboo.planner.healing import can_balance, can_protect, vacancies, with_standby
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
        places = vacancies(plan)
        for node, place in self._calls.called(plan).items():
            if place in places:
                return place, node
        idle = self._calls.idle(plan)
        if not (idle and places):
            return None
        place, node = places[0], idle[0]
        pipeline = with_standby(plan.pipelines[place.pipeline], place.rank, node)
        self._calls.call(node, place, pipeline)
        return place, node

    def is_due(self, plan: Plan, standby: Standby | None) -> bool:
        """Whether a change can be planned now."""
        if plan.change is not None:
            return False
        if standby is not None:
            return self._members.is_ready(standby[1])
        return can_protect(plan) or can_balance(plan, self._balance)
