"""When a dissolved pipeline begins again: as soon as there are standbys for all of its stages.

Vacancies of the others come first: each of them needs one standby only.
"""

from functools import partial

from megatron_bamboo.agent.calls import Calls
from megatron_bamboo.agent.members import Members
from megatron_bamboo.planner.growing import Growth, crewed, growable, to_begin
from megatron_bamboo.planner.healing import vacancies
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.planner.rebalancing import Balance


class Grower:
    """Which standbys are to become a pipeline."""

    def __init__(self, members: Members, calls: Calls, balance: Balance | None) -> None:
        self._members = members
        self._calls = calls
        self._balance = balance

    def due(self, plan: Plan) -> Growth | None:
        """The pipeline that can begin now, whose nodes are all ready; called if need be."""
        if self._balance is None or plan.change is not None or vacancies(plan):
            return None
        for number in growable(plan)[:1]:
            pipeline = to_begin(plan, number)
            begun = partial(crewed, pipeline, redundancy=self._balance.redundancy)
            crew = self._calls.crew(plan, number, pipeline.shape.num_stages, begun)
            if crew and all(map(self._members.is_ready, crew)):
                return Growth(number, crew)
        return None
