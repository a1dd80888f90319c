"""When a dissolved pipeline begins again: as soon as there are standbys for all of its stages.

Vacancies of the others come first: each of them needs one standby only.
"""

from megatron_bamboo.agent.calls import Calls
from megatron_bamboo.agent.members import Members
from megatron_bamboo.planner.growing import Growth, crewed, growable, to_begin
from megatron_bamboo.planner.healing import Vacancy, vacancies
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
            crew = self._crew(plan, number, self._balance)
            if crew and all(map(self._members.is_ready, crew)):
                return Growth(number, crew)
        return None

    def _crew(self, plan: Plan, number: int, balance: Balance) -> tuple[str, ...]:
        """By rank who has been called; nobody while there are too few."""
        pipeline = to_begin(plan, number)
        shape = pipeline.shape
        called = self._calls.called(plan).items()
        crew = {place.rank: node for node, place in called if place.pipeline == number}
        missing = [rank for rank in range(shape.num_stages) if rank not in crew]
        idle = self._calls.idle(plan)
        if len(idle) < len(missing):
            return ()
        crew |= dict(zip(missing, idle, strict=False))
        nodes = tuple(crew[rank] for rank in range(shape.num_stages))
        begun = crewed(pipeline, nodes, balance.redundancy)
        for rank in missing:
            self._calls.call(crew[rank], Vacancy(number, rank), begun)
        return nodes
