"""When a planned change is due after losses, and who takes part in it.

A free standby is called first, since it gives a pipeline its shape back; while it gets ready,
nothing else is changed. Without one the stages that have lost their replica get a new one on the
nodes that are left. Where the policy lets microbatches change, they go with the same change, or by
themselves if nothing else is left to do.
"""

import json
from dataclasses import asdict

from megatron_bamboo.agent.ending import Standby
from megatron_bamboo.agent.members import Members
from megatron_bamboo.membership.assignment import called_key
from megatron_bamboo.membership.table import Table
from megatron_bamboo.planner.healing import (
    Vacancy,
    can_balance,
    can_protect,
    stages_to_hold,
    vacancies,
    with_standby,
)
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.planner.rebalancing import Balance


class Healer:
    """Which standby has been called, and for which place."""

    def __init__(self, members: Members, table: Table, balance: Balance | None = None) -> None:
        self._members = members
        self._table = table
        self._balance = balance
        self._called = self._called_before()

    def standby_for(self, plan: Plan) -> Standby | None:
        """The standby that gets ready, or is, for a vacancy of this plan; called if need be."""
        members = self._members
        free = [
            node
            for node in members.waiting_standbys()
            if node not in plan.nodes and not members.is_leaving(node)
        ]
        places = vacancies(plan)
        called = self._called
        if called is None or called[1] not in free:
            if not (free and places):
                return None
            vacancy = places[0]
            self._call(plan, vacancy, free[0])
            called = self._called = (vacancy, free[0])
        # It has built the stages of one place; another one can use it only if it is called anew.
        return called if called[0] in places else None

    def is_due(self, plan: Plan, standby: Standby | None) -> bool:
        """Whether a change can be planned now."""
        if plan.change is not None:
            return False
        if standby is not None:
            return self._members.is_ready(standby[1])
        return can_protect(plan) or can_balance(plan, self._balance)

    def _called_before(self) -> Standby | None:
        """Whom an earlier coordinator has called last."""
        called = self._table.items(called_key(""))
        if not called:
            return None
        key, place = list(called.items())[-1]
        values = json.loads(place)
        vacancy = Vacancy(values["pipeline"], values["rank"])
        return vacancy, key.removeprefix(called_key(""))

    def _call(self, plan: Plan, vacancy: Vacancy, node: str) -> None:
        pipeline = with_standby(plan.pipelines[vacancy.pipeline], vacancy.rank, node)
        stages = stages_to_hold(pipeline, node)
        place = {
            "pipeline": vacancy.pipeline,
            "rank": vacancy.rank,
            "stages": stages,
            "shape": asdict(pipeline.shape),
        }
        self._table.set(called_key(node), json.dumps(place).encode())
